"""Stopping all processes of a run together once any of them has received a signal."""

from __future__ import annotations

from dpo.parallel.mesh import Mesh
from dpo.system.signals import Stopped


class StopRequest:
    """The signals this process has received, and whether all processes have agreed to stop."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self.signals: list[int] = []
        self.is_agreed = False

    def raise_if_agreed(self) -> None:
        """Raises Stopped once all processes have agreed; a single process agrees at once."""
        if self.is_agreed or (self._mesh.world_size == 1 and self.signals):
            raise Stopped(*self.signals[:1])

    def raise_if_any(self) -> None:
        """Raises Stopped on every process if any of them has received a signal; costs a collective."""
        if self._mesh.any(bool(self.signals)):
            raise Stopped(*self.signals[:1])
