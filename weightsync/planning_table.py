"""How many bytes each link would carry to publish a large model, computed from the bucket plan.

    ./bazelw run //weightsync:planning_table
    ./bazelw run //weightsync:planning_table -- --nodes 3 --engines-per-node 8 --bucket-mib 1024

Nothing here is measured. The tensors are those of Qwen3-30B-A3B in bf16; buckets are cut by
`plan.make_plan`; a bucket's way is that of `core/tcp_tree`: the trainer sends to engines
0 .. fan_out - 1 and engine i to those from fan_out * (i + 1) on, engines being ranked node by
node, on nodes of their own. `fan_out` = number of engines is what serial unicasts would be. The
bound is the busiest NIC's bytes at line rate: no latency, no pipeline to fill, no engine that
loads more slowly than its link.
"""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import dataclass

from weightsync.plan import Plan, TensorSpec, make_plan

TRAINER = -1
"""The trainer's node; engines' nodes count from 0."""

RATES_GBIT_S = {"400 Gb/s": 400.0, "8 x 400 Gb/s": 3200.0}

PUBLISHED = (
    ("Miles, NCCL, 2 + 2 H100 nodes", "2.67 s"),
    ("Miles, RDMA, 2 + 2 H100 nodes", "2.16 s"),
    ("AMD and Miles' article, 24 engines", "about 23 s"),
)
"""Whole publications of the same model, as their authors measured them."""


@dataclass(frozen=True, slots=True)
class Topology:
    """Engines on nodes of equal size, beside the trainer's node."""

    num_nodes: int
    engines_per_node: int

    @property
    def num_engines(self) -> int:
        return self.num_nodes * self.engines_per_node

    def node(self, engine: int) -> int:
        """Where an engine runs; TRAINER for the trainer."""
        return TRAINER if engine == TRAINER else engine // self.engines_per_node


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of one publication."""

    trainer_out: int
    """Over the trainer's NIC."""
    busiest_nic: int
    """Over the busiest NIC in its busier direction; sending and receiving do not share."""
    between_nodes: int
    """Over all links between nodes together."""
    within_nodes: int
    """Between engines of one node."""


def qwen3_30b_a3b() -> list[TensorSpec]:
    """Qwen3-30B-A3B's tensors as its checkpoint names them, in bf16: 30.5 G elements."""
    hidden, heads, kv_heads, head_dim, experts, width, vocab = 2048, 32, 4, 128, 128, 768, 151936

    def spec(name: str, *shape: int) -> TensorSpec:
        return TensorSpec(name, shape, "bfloat16")

    specs = [spec("model.embed_tokens.weight", vocab, hidden)]
    for number in range(48):
        layer = f"model.layers.{number}"
        attention = f"{layer}.self_attn"
        specs += [
            spec(f"{layer}.input_layernorm.weight", hidden),
            spec(f"{attention}.q_proj.weight", heads * head_dim, hidden),
            spec(f"{attention}.k_proj.weight", kv_heads * head_dim, hidden),
            spec(f"{attention}.v_proj.weight", kv_heads * head_dim, hidden),
            spec(f"{attention}.o_proj.weight", hidden, heads * head_dim),
            spec(f"{attention}.q_norm.weight", head_dim),
            spec(f"{attention}.k_norm.weight", head_dim),
            spec(f"{layer}.post_attention_layernorm.weight", hidden),
            spec(f"{layer}.mlp.gate.weight", experts, hidden),
        ]
        for expert in range(experts):
            mlp = f"{layer}.mlp.experts.{expert}"
            specs += [
                spec(f"{mlp}.gate_proj.weight", width, hidden),
                spec(f"{mlp}.up_proj.weight", width, hidden),
                spec(f"{mlp}.down_proj.weight", hidden, width),
            ]
    return [*specs, spec("model.norm.weight", hidden), spec("lm_head.weight", vocab, hidden)]


def parent(engine: int, fan_out: int) -> int:
    """Whom an engine gets its buckets from, as in core/tcp_tree.h."""
    return TRAINER if engine < fan_out else engine // fan_out - 1


def traffic(plan: Plan, topology: Topology, fan_out: int) -> Traffic:
    """Bytes over each kind of link for one publication.

    Raises ValueError for a fan_out below 1.
    """
    if fan_out < 1:
        raise ValueError(f"fan_out is {fan_out}, wanted 1 or more")
    num_bytes = sum(bucket.num_bytes for bucket in plan.buckets)
    sent: Counter[int] = Counter()
    received: Counter[int] = Counter()
    within = 0
    for engine in range(topology.num_engines):
        source = topology.node(parent(engine, fan_out))
        target = topology.node(engine)
        if source == target:
            within += num_bytes
        else:
            sent[source] += num_bytes
            received[target] += num_bytes
    return Traffic(
        trainer_out=sent[TRAINER],
        busiest_nic=max(*sent.values(), *received.values()),
        between_nodes=sent.total(),
        within_nodes=within,
    )


def table(plan: Plan, topology: Topology) -> list[str]:
    """The table's lines."""
    num_engines = topology.num_engines
    rates = "".join(f"{f'bound at {name}':>24}" for name in RATES_GBIT_S)
    what = (
        f"Qwen3-30B-A3B, bf16: {plan.total_bytes / 1e9:.2f} GB in {len(plan.tensors):,} tensors, "
        f"{len(plan.buckets)} buckets (rounds) of at most {plan.bucket_bytes / 2**20:.0f} MiB; "
        f"{num_engines} engines on {topology.num_nodes} nodes"
    )
    lines = [
        what,
        "computed from the plan, not measured; GB of one whole publication:",
        "  fan_out      trainer.weight_sync.tcp.fan_out: how often the trainer sends each bucket",
        "  trainer out  what leaves the trainer's NIC",
        "  busiest NIC  of any node, in its busier direction",
        "  between      over all links between nodes; within: between engines of one node",
        "  bound        the busiest NIC's bytes at line rate",
        f"{'fan_out':>8}{'trainer out':>14}{'busiest NIC':>14}{'between':>12}{'within':>12}{rates}",
    ]
    for fan_out in sorted({1, 2, topology.num_nodes, num_engines}):
        of = traffic(plan, topology, fan_out)
        row = f"{fan_out:>8}"
        for value, width in (
            (of.trainer_out, 14),
            (of.busiest_nic, 14),
            (of.between_nodes, 12),
            (of.within_nodes, 12),
        ):
            row += f"{f'{value / 1e9:,.0f} GB':>{width}}"
        for rate in RATES_GBIT_S.values():
            row += f"{f'{of.busiest_nic * 8 / (rate * 1e9):.2f} s':>24}"
        lines.append(row)
    lines.append("published, measured by their authors (whole publications, on their machines):")
    return lines + [f"  {who}: {what}" for who, what in PUBLISHED]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--engines-per-node", type=int, default=8)
    parser.add_argument("--bucket-mib", type=int, default=1024)
    arguments = parser.parse_args()
    if min(arguments.nodes, arguments.engines_per_node, arguments.bucket_mib) < 1:
        parser.error("--nodes, --engines-per-node and --bucket-mib want 1 or more")
    try:
        plan = make_plan(qwen3_30b_a3b(), arguments.bucket_mib * 2**20)
    except ValueError as error:
        parser.error(str(error))
    print("\n".join(table(plan, Topology(arguments.nodes, arguments.engines_per_node))))


if __name__ == "__main__":
    main()
