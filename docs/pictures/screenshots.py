"""Takes the pictures of a report for the documents, at two widths and in both themes.

    python docs/pictures/screenshots.py            # searches a layer on this machine first
    python docs/pictures/screenshots.py FOLDER     # of an existing report

It needs a Chromium (Debian and Ubuntu: `apt install chromium`; CHROMIUM names another program) and
DejaVu Sans (`apt install fonts-dejavu-core`). It writes docs/pictures/report-WIDTH-THEME.png.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
SIZES = {1280: 1000, 390: 1100}
"""The heights of the pictures by width, in pixels: the first screen of the page."""
THEMES = {"light": 1, "dark": 0}
"""Chromium's numbers of the themes."""
SEARCH = ("search", "768x3072", "--trials", "48", "--quiet")


def browser() -> str:
    """The path of Chromium; exits with a message if there is none."""
    names = (os.environ.get("CHROMIUM", "chromium"), "chromium-browser", "google-chrome")
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        sys.exit("There is no Chromium: apt install chromium, or name one in CHROMIUM.")
    return path


def shoot(page: Path, target: Path, width: int, height: int, theme: str) -> None:
    """Take one picture.

    A window of headless Chromium is at least 500 pixels wide, so a frame of the width shows the
    page, and the picture shows only the frame.
    """
    with tempfile.TemporaryDirectory() as folder:
        frame = Path(folder) / "frame.html"
        style = f"border:0;width:{width}px;height:{height}px"
        frame.write_text(
            f'<meta name="color-scheme" content="{theme}"><body style="margin:0">'
            f'<iframe src="{page.resolve().as_uri()}" style="{style}"></iframe>',
            encoding="utf-8",
        )
        command = [
            *(browser(), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
            *("--allow-file-access-from-files", f"--user-data-dir={folder}/profile"),
            f"--blink-settings=preferredColorScheme={THEMES[theme]}",
            *(f"--window-size={width},{height}", f"--screenshot={target}", frame.as_uri()),
        ]
        subprocess.run(command, check=True, timeout=120, stderr=subprocess.DEVNULL)


def main() -> int:
    """Search if no folder is named, then take all pictures."""
    parser = argparse.ArgumentParser(description="Take the pictures of a report.")
    parser.add_argument("folder", nargs="?", type=Path, help="of a search's report")
    folder = parser.parse_args().folder
    with tempfile.TemporaryDirectory() as searched:
        if folder is None:
            folder = Path(searched) / "report"
            command = [sys.executable, "-m", "ksopt", *SEARCH, "--out", str(folder)]
            subprocess.run(command, check=True)
        for width, height in SIZES.items():
            for theme in THEMES:
                target = HERE / f"report-{width}-{theme}.png"
                shoot(folder / "report.html", target, width, height, theme)
                print(target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
