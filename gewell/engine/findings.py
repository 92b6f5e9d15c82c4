"""What a verification found: single comparisons, and the worst of each kind for people."""

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One comparison: `what` of a case, computed in this way. `difference` is the largest; ids count wrong ones."""

    case: str
    way: str
    layout: str
    what: str
    difference: float
    tolerance: float

    @property
    def is_ok(self) -> bool:
        return self.difference <= self.tolerance


@dataclass(slots=True, kw_only=True)
class Verification:
    folder: str
    findings: list[Finding] = field(default_factory=list)

    @property
    def is_ok(self) -> bool:
        return bool(self.findings) and all(finding.is_ok for finding in self.findings)

    def worst(self) -> list[Finding]:
        """One finding for each case and kind of thing compared: the one that comes closest to, or furthest beyond, its
        tolerance. Numbered things ("hidden.3") are one kind."""
        found: dict[tuple[str, str], Finding] = {}
        for finding in self.findings:
            key = (finding.case, finding.what.split(".")[0])
            if key not in found or _badness(finding) > _badness(found[key]):
                found[key] = finding
        return list(found.values())

    def as_dict(self) -> dict[str, Any]:
        comparisons = [asdict(finding) | {"is_ok": finding.is_ok} for finding in self.findings]
        return {"folder": self.folder, "is_ok": self.is_ok, "comparisons": comparisons}


def _badness(finding: Finding) -> tuple[bool, float]:
    return not finding.is_ok, finding.difference
