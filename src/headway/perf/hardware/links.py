"""Links between accelerators: bandwidth of one direction, and latency until the first byte arrives.

Bandwidths are the makers' (bytes/s, one direction, per accelerator or per network card). Latencies are assumptions of
the order that NCCL point-to-point shows, named here so that they can be replaced; nothing is measured at run time.
"""

from __future__ import annotations

import msgspec

from headway.core.errors import ConfigError


class NetworkLink(msgspec.Struct, frozen=True, kw_only=True):
    """One direction of a link."""

    name: str
    bytes_per_s: float
    latency_s: float
    source: str
    """Origin of the numbers, in words."""
    efficiency: float = 0.8
    """Share of `bytes_per_s` that a large message reaches."""

    def transfer_s(self, count: int) -> float:
        """Return the seconds of one message of `count` bytes between two neighbours."""
        return self.latency_s + count / (self.bytes_per_s * self.efficiency)


def _nvlink(name: str, both_ways: float, source: str) -> NetworkLink:
    # Data sheets state NVLink's two directions together.
    return NetworkLink(name=name, bytes_per_s=both_ways / 2, latency_s=3e-6, source=source)


def _network(name: str, gbit_s: float, latency_s: float, source: str) -> NetworkLink:
    # Gbit/s (10^9 bits) to bytes/s.
    return NetworkLink(name=name, bytes_per_s=gbit_s * 1e9 / 8, latency_s=latency_s, source=source, efficiency=0.9)


LINKS: dict[str, NetworkLink] = {
    link.name: link
    for link in (
        _nvlink("nvlink3", 600e9, "NVIDIA A100 data sheet: 600 GB/s both ways together"),
        _nvlink("nvlink4", 900e9, "NVIDIA H100 data sheet: 900 GB/s both ways together"),
        _nvlink("nvlink-400", 400e9, "NVIDIA A800 and H800: NVLink reduced to 400 GB/s both ways together"),
        NetworkLink(name="pcie4", bytes_per_s=31.5e9, latency_s=5e-6, source="PCI Express 4.0 x16"),
        NetworkLink(name="pcie5", bytes_per_s=63e9, latency_s=5e-6, source="PCI Express 5.0 x16"),
        _network("ib-100", 100, 6e-6, "InfiniBand EDR, one card an accelerator"),
        _network("ib-200", 200, 6e-6, "InfiniBand HDR, one card an accelerator (Azure NDm A100 v4; Tetris §7.1)"),
        _network("ib-400", 400, 6e-6, "InfiniBand NDR, one card an accelerator (Azure ND H100 v5, Medha's cluster)"),
        _network("roce-200", 200, 10e-6, "RoCE v2, 200 Gb/s an accelerator"),
        _network("roce-400", 400, 10e-6, "RoCE v2, 400 Gb/s an accelerator"),
    )
}


def link(name: str) -> NetworkLink:
    """Return a preset by name. Raises ConfigError, listing those that exist, for an unknown one."""
    if name not in LINKS:
        raise ConfigError(f"unknown link {name!r}; known: {', '.join(LINKS)}")
    return LINKS[name]
