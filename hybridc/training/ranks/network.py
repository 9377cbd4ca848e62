"""How long messages between ranks take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Network:
    """A latency and a bandwidth (Hockney's model), as every rank sees them."""

    latency_us: float = 1.5
    bytes_per_us: float = 12_500.0
    """The defaults are what vendors state of networks of 100 Gb/s."""

    def all_reduce_us(self, size_bytes: int, ranks: int) -> float:
        """Of one bucket: two phases of N - 1 messages, each with an N-th of the bytes.

        The latencies of a phase's messages follow one another at worst.
        """
        messages = 2 * (ranks - 1)
        return messages * (self.latency_us + size_bytes / ranks / self.bytes_per_us)

    def reduce_us(self, most_bytes: int, ranks: int) -> float:
        """Of one bucket whose sums each only one rank needs: it gets N - 1 messages, one after the other.

        `most_bytes` are those that the rank adds up which has most to add up.
        """
        return (ranks - 1) * (self.latency_us + most_bytes / self.bytes_per_us)
