"""Take the documentation's pictures of a run's page, in headless Chromium.

python -m tools.page_pictures   # of two runs that tests/recorded_runs.py makes up
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from apps import report
from tests.recorded_runs import recorded_run
from tools.browser import Browser

FOLDER = Path(__file__).parent.parent / "docs" / "pictures" / "page"
_WIDE, _PHONE = (1440, 900), (390, 844)
_PICTURES = {
    "curves": ("curves/0/", _WIDE, False),
    "episodes": ("episodes/0/?order=worst&kind=trained", _WIDE, False),
    "conversation": ("episode/0/24-trained-9", _WIDE, False),
    "tokens": ("episode/0/24-trained-25?view=tokens&colour=logprob", _WIDE, False),
    "groups": ("groups/0/", _WIDE, False),
    "timeline": ("timeline/0/", _WIDE, False),
    "data": ("tasks/0/", _WIDE, True),
    "faults": ("faults/0/", _WIDE, False),
    "compare": ("compare/0/", _WIDE, False),
    "phone": ("episode/0/24-trained-25?view=tokens&colour=gap", _PHONE, False),
    "phone-curves": ("curves/0/", _PHONE, True),
}
"""Place in the page, size in pixels, and whether it is dark, by name."""


def main() -> None:
    """Write all pictures."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, Browser() as browser:
        run = recorded_run(Path(folder, "grpo-1a2b3c4d"), "mixed", steps=24, groups=8, size=8, skill=0.9)
        settings: dict[str, object] = {"trainer": {"optimizer": {"lr": 1e-3}}}
        other = recorded_run(
            Path(folder, "grpo-5e6f7a8b"), "mixed", steps=24, groups=8, size=8, skill=0.3, settings=settings
        )
        page = Path(folder, "page.html")
        report.write(report.Config(run=run, compare=other, out=page, episodes=6000))
        for name, (place, (width, height), dark) in _PICTURES.items():
            tab = browser.open(f"{page.as_uri()}#{place}", width=width, height=height, dark=dark)
            tab.wait_for("document.documentElement?.dataset.opened")
            if "view=tokens" in place:
                tab.move_to("document.querySelectorAll('.token')[2]")
            time.sleep(0.5)  # charts are drawn when they come on the screen
            tab.picture(FOLDER / f"{name}.webp", kind="webp")
            assert not tab.problems, tab.problems
            print(f"{name}.webp: {(FOLDER / f'{name}.webp').stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
