"""What a report is made of: sections of figures, tables and notes. Owner: `launch/report`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from launch.report.charts import Plot


@dataclass(frozen=True)
class Figure:
    """A chart with its title and a line on how to read it; `plot` None: no data yet."""

    name: str
    """Id in the page, unique."""
    title: str
    caption: str
    plot: Plot | None
    wide: bool = False


@dataclass(frozen=True)
class Table:
    """Rows of text under a title. `numeric` columns are set to the right."""

    name: str
    title: str
    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    numeric: Sequence[int] = ()
    wide: bool = True


@dataclass(frozen=True)
class Tile:
    """One figure at a glance: its name, the value, and what it means."""

    title: str
    value: str
    note: str
    href: str = ""
    tone: str = ""
    """good, bad, or empty."""


@dataclass(frozen=True)
class Section:
    """A question, and the blocks that answer it."""

    name: str
    title: str
    lead: str
    blocks: Sequence[Figure | Table]
    why_empty: str
    """Shown when no block has data."""

    shown: Sequence[Figure | Table] = field(init=False)
    missing: Sequence[str] = field(init=False)

    def __post_init__(self) -> None:
        """Parts what can be shown from what has no data yet."""
        has_data = [
            block.plot is not None if isinstance(block, Figure) else bool(block.rows)
            for block in self.blocks
        ]
        pairs = list(zip(self.blocks, has_data, strict=True))
        object.__setattr__(self, "shown", [block for block, has in pairs if has])
        object.__setattr__(self, "missing", [block.title for block, has in pairs if not has])
