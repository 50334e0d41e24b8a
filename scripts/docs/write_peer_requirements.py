"""Write the table of peers' requirements in docs/reference/http.md, from `tests/serving/peers`.

python scripts/docs/write_peer_requirements.py
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "http.md"
BEGIN, END = "<!-- requirements: begin -->", "<!-- requirements: end -->"


def section() -> str:
    """The table, what does not hold, and what does not apply."""
    sys.path.insert(0, str(ROOT))
    from tests.serving.peers.requirement import NOT_APPLICABLE
    from tests.serving.peers.test_requirements import REQUIREMENTS

    lines = ["| requirements on | apply | hold |", "|---|---|---|"]
    for area in dict.fromkeys(each.area for each in REQUIREMENTS):
        of_area = [each for each in REQUIREMENTS if each.area == area]
        lines.append(f"| {area} | {len(of_area)} | {sum(each.missing is None for each in of_area)} |")
    missing = [each for each in REQUIREMENTS if each.missing is not None]
    held = len(REQUIREMENTS) - len(missing)
    lines.append(f"| all | {len(REQUIREMENTS)} | {held} ({100 * held / len(REQUIREMENTS):.1f} %) |")
    lines += ["", "Do not hold:", ""]
    lines += [f"- {each.sentence} Not here: {each.missing}." for each in missing]
    lines += ["", "Do not apply:", ""]
    lines += [f"- {what}: {why}." for what, why in NOT_APPLICABLE]
    return "\n".join(lines)


def page() -> str:
    """The page with a new section."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return f"{before}{BEGIN}\n{section()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
