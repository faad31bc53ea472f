"""Does the hardware profile speak of this model, and of hardware that somebody ran?

Rates are fitted to runs of one model. Those of another size would need other rates: what is simulated for it is a guess.
"""

from __future__ import annotations

from rpipe.config import Config, ConfigError
from rpipe.sim.costs import hardware_of
from rpipe.sim.shape import shape_of

SAME_SIZE = 0.1  # a share of the fitted model's parameters; norms and a made model's vocabulary are counted roughly


def calibrated(config: Config) -> bool:
    """Raises ConfigError where the config names no hardware."""
    return hardware_of(config).calibrated and not objection(config)


def described(config: Config) -> str:
    """The hardware in a few words. Raises ConfigError where the config names none."""
    hardware = hardware_of(config)
    word = "calibrated" if calibrated(config) else "UNCALIBRATED for this model" if hardware.calibrated else "UNCALIBRATED"
    return f"{hardware.name} ({word}: {hardware.source})"


def objection(config: Config) -> str:
    """One line: why a profile that was fitted to logs does not count as calibrated here. Empty where it does, or never was."""
    hardware = hardware_of(config)
    if not hardware.calibrated:
        return ""
    begin, fitted = f"not calibrated: hardware {hardware.name}", hardware.fitted_parameters
    if fitted is None:
        return f"{begin} does not say how large the model was that it was fitted to (hardware.fitted_parameters)"
    try:
        parameters = shape_of(config).parameters
    except ConfigError as error:
        return f"{begin} was fitted to a model of {fitted:,} parameters, and how large this one is nothing says: {error}"
    if abs(parameters / fitted - 1) <= SAME_SIZE:
        return ""
    return (
        f"{begin} was fitted to a model of {fitted:,} parameters (hardware.fitted_parameters), this one has {parameters:,};"
        " wanted: rpipe calibrate on runs of this one"
    )
