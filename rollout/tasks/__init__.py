"""Tasks: what agents work on, as Harbor task folders, and how their tests are graded."""
