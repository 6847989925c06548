"""One forward of a prepared model, whose graph may still be used."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(eq=False)
class ForwardPass:
    """Lives as long as the graph of one forward of the root module; done once that graph was used up.

    `ended_by` is what a block raised to end it: a model may catch all exceptions, and would go on without the block.
    `calls` counts the calls of each block, by its name. A forward `has_trained` that has run a backward itself.
    """

    trains: bool = False
    has_trained: bool = False
    done: bool = False
    ended_by: Exception | None = None
    calls: dict[str, int] = field(default_factory=dict)

    def count(self, block: str) -> None:
        self.calls[block] = self.calls.get(block, 0) + 1
