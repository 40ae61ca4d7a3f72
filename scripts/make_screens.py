"""What a user sees, as files: `python scripts/make_screens.py [DIR]` (default: build/screens). About a minute.

start.txt: a server's banner, then its status lines under load; home.html: its page at `/`; sweep.txt: a sweep's table;
point.png: the plot of one point; reproduce.txt: the list of experiments.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SCENARIO = str(ROOT / "examples" / "chat-and-documents.yaml")
HEADWAY = (sys.executable, "-m", "headway.cli.main")


def serve(folder: Path) -> None:
    """Start a server, load it for some seconds, keep what it says and its page."""
    from headway.core.ports import free_port

    url = f"http://127.0.0.1:{(port := free_port())}"
    with (folder / "start.txt").open("w") as out:
        words = ("serve", "--port", str(port), "--status-every-s", "2")
        server = subprocess.Popen([*HEADWAY, *words], stdout=out, stderr=subprocess.STDOUT)
        try:
            wait_until_ready(f"{url}/ready", server)
            load = ("bench", "--url", url, "--preset", "sharegpt-like", "--rate", "4", "--num-requests", "20")
            subprocess.run([*HEADWAY, *load], check=True, capture_output=True)
            with urllib.request.urlopen(f"{url}/") as answer:
                (folder / "home.html").write_bytes(answer.read())
        finally:
            server.terminate()
            server.wait()


def wait_until_ready(url: str, server: subprocess.Popen[bytes]) -> None:
    pause = threading.Event()
    while server.poll() is None:
        try:
            with urllib.request.urlopen(url):
                return
        except OSError:
            pause.wait(0.2)
    raise SystemExit("the server did not start: see start.txt")


def keep(path: Path, *words: str) -> None:
    """Write what a command prints."""
    done = subprocess.run([*HEADWAY, *words], check=True, capture_output=True, text=True)
    path.write_text(done.stdout)


def main(folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    short = ("--set", "run.window_s=60", "--seeds", "0")
    keep(folder / "reproduce.txt", "reproduce", "--list")
    keep(folder / "sweep.txt", "simulate", SCENARIO, *short, "--sweep", "workload.qps=0.5,1,1.5")
    keep(folder / "point.txt", "simulate", SCENARIO, *short, "--plot", str(folder / "point.png"))
    serve(folder)
    print("\n".join(str(path) for path in sorted(folder.iterdir())))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build" / "screens")))
