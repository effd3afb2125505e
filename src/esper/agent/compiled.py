"""The compiled network, with the plain one behind it: what cannot be compiled is said, and the run goes on."""

from __future__ import annotations

from typing import Any

import torch

from esper.errors import first_line
from esper.policy.network import FactoredRecurrentActorCritic, NetworkOutput


class CompiledForward:
    """Calls the compiled form of a network; from the first failure on, the network itself.

    `torch.compile` works when it is first called, for every new shape again: that is where it can fail (no compiler on
    the machine, an operation it does not know). If the network itself fails too, it was no matter of compiling, and
    its own error is the one to see.
    """

    def __init__(self, network: FactoredRecurrentActorCritic) -> None:
        self._network = network
        # Graph breaks are expected at the LSTM (Dynamo leaves recurrent modules to the library kernel).
        self._compiled: Any = torch.compile(network, mode="default", fullgraph=False, dynamic=True)
        self._failure: str | None = None

    def __call__(self, *arguments: Any) -> NetworkOutput:
        if self._compiled is None:
            return self._plain(*arguments)
        try:
            found: NetworkOutput = self._compiled(*arguments)
        except Exception as error:
            found = self._plain(*arguments)
            self._compiled = None
            self._failure = f"{type(error).__name__}: {first_line(error)}"
        return found

    def _plain(self, *arguments: Any) -> NetworkOutput:
        found: NetworkOutput = self._network(*arguments)
        return found

    def take_failure(self) -> str | None:
        """Why the compiled form is no longer used; given once."""
        failure, self._failure = self._failure, None
        return failure
