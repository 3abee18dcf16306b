"""The device that a plan is for: the one here that the settings name, or a card of the table."""

from __future__ import annotations

from octavo.errors import ConfigError
from octavo.planning.cards import Card, find_card
from octavo.planning.hardware import detect_cpu, detect_gpus, detect_memory
from octavo.planning.plan import Machine, machine_of


def planned_machine(device: str, gpu: str | None) -> Machine:
    """What the settings name.

    Args:
        device: the engine's setting: auto, cpu, cuda or cuda:N.
        gpu: a card of the table, or None for what is here.

    Raises:
        ConfigError: no such device here, or no such card.
    """
    if gpu is not None:
        if device == "cpu":
            raise ConfigError(f"gpu={gpu!r} contradicts device='cpu': leave one out")
        return machine_of(find_card(gpu))
    found = detect_gpus()
    if device == "cpu" or (device == "auto" and not found.gpus):
        memory = detect_memory()
        return Machine("cpu", f"cpu ({detect_cpu().model})", memory.total, memory.total - memory.available)
    if not found.gpus:
        raise ConfigError(f"device={device!r} is not here ({found.note}): name a card with --gpu")
    number = int(device.partition(":")[2] or 0)
    if number >= len(found.gpus):
        raise ConfigError(f"device={device!r}: only cuda:0 to cuda:{len(found.gpus) - 1} are visible")
    here = found.gpus[number]
    return Machine(
        "cuda",
        f"cuda:{number} ({here.name})",
        here.total_memory,
        here.total_memory - here.free_memory,
        _card_named(here.name),
        here.compute_capability,
    )


def _card_named(name: str) -> Card | None:
    """The table's entry of a card that is here, for its bandwidth; None if it has none."""
    try:
        return find_card(name)
    except ConfigError:
        return None
