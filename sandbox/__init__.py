"""SandboxBroker: leases on isolated sandboxes."""
