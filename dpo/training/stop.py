"""Stop all processes together once one has received a signal."""

from dataclasses import dataclass, field

from dpo.parallel.mesh import Mesh
from dpo.system.signals import Stopped

TOKENS_BETWEEN_CHECKS = 8  # with several processes, as each check is a collective that waits for the device


@dataclass
class StopRequest:
    """The signals that this process has received, and whether the processes have agreed to stop."""

    mesh: Mesh
    signals: list[int] = field(default_factory=list)  # signal numbers, in the order received
    is_agreed: bool = False  # whether every process knows that one has received a signal; set by `train_step`

    def raise_if_agreed(self) -> None:
        """Raise Stopped if all processes have agreed; one that runs alone needs no agreement."""
        if self.is_agreed or (self.mesh.world_size == 1 and self.signals):
            raise Stopped(*self.signals[:1])  # a process without a signal of its own raises Stopped with its default

    def raise_if_any(self) -> None:
        """Raise Stopped on every process if any has received a signal; with several processes, a collective."""
        if self.mesh.any(bool(self.signals)):
            raise Stopped(*self.signals[:1])

    def raise_before_token(self, index: int) -> None:
        """Call `raise_if_any` before the token at `index` of an answer; with several processes, only before some."""
        if self.mesh.world_size == 1 or index % TOKENS_BETWEEN_CHECKS == 0:
            self.raise_if_any()
