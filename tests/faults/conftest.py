"""The small family of the training tests, and the toys of agents and recordings, are used here, too."""

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / name) for name in ("training", "agent", "offline")]
