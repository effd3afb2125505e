"""`esper offline`: a policy that does what paid in a recording, not merely what was done."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from esper.cli.clone import FromRecording
from esper.offline.iql import IQLConfig, iql
from esper.offline.recording import growth_schema, read


@dataclass(frozen=True, kw_only=True)
class Offline(FromRecording, IQLConfig):
    """Learn from recorded episodes and their rewards by implicit Q-learning; judge the result in the environment.

    The recording needs several controllers, or exploration noise.
    """

    out: Path = Path("offline.safetensors")

    def run(self) -> int:
        recording = read(self.recording, growth_schema())
        return self._learn("esper offline", recording, self.config_as(IQLConfig), iql)


COMMAND = Offline
