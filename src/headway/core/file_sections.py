"""Files of nested sections (scenarios, clusters, accelerator settings): one form of section, one form of error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from headway.core.errors import ConfigError
from headway.core.parse import duration, milliseconds, number, tokens


def parsed_by(parse: Callable[[Any], Any], only: type = object) -> BeforeValidator:
    """Parse values of type `only` with a function that raises ConfigError; pydantic collects ValueErrors only."""

    def validate(value: Any) -> Any:
        try:
            return parse(value) if isinstance(value, only) else value
        except ConfigError as error:
            raise ValueError(str(error)) from None

    return BeforeValidator(validate)


# Numbers may be texts with a unit (`core.parse`): 128k, 55ms.
Positive = Annotated[float, parsed_by(number, str), Field(gt=0, allow_inf_nan=False)]
PositiveOrZero = Annotated[float, parsed_by(number, str), Field(ge=0, allow_inf_nan=False)]
Seconds = Annotated[float, parsed_by(duration, str), Field(gt=0, allow_inf_nan=False)]
SecondsOrZero = Annotated[float, parsed_by(duration, str), Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, parsed_by(tokens, str), Field(ge=1)]
CountOrZero = Annotated[int, parsed_by(tokens, str), Field(ge=0)]
Machines = Annotated[Count, Field(le=10_000)]
"""Instances, accelerators: more are a slip of the keyboard."""
LEAST_AIM_S, MOST_AIM_S = 0.001, 10.0
"""Gaps between tokens that someone may want: below, no iteration ends; above, nobody would call it a stream."""
Aim = Annotated[float, parsed_by(duration, str), Field(ge=LEAST_AIM_S, le=MOST_AIM_S)]
AimMs = Annotated[float, parsed_by(milliseconds, str), Field(ge=1000 * LEAST_AIM_S, le=1000 * MOST_AIM_S)]


def distinct_seeds(seeds: tuple[int, ...]) -> tuple[int, ...]:
    """Return the seeds. Raises ValueError where one is repeated."""
    if len(set(seeds)) < len(seeds):
        raise ValueError("give each seed once: equal seeds give equal runs")
    return seeds


Seeds = Annotated[tuple[CountOrZero, ...], Field(min_length=1), AfterValidator(distinct_seeds)]
SomeSection = TypeVar("SomeSection", bound="FileSection")

_MOST_FAULTS, _LONGEST_SHOWN = 5, 100
_LIMITS = {
    "greater_than_equal": "at least",
    "greater_than": "above",
    "less_than_equal": "at most",
    "less_than": "below",
}
"""Pydantic's kinds of faults that are a crossed limit."""

_SHAPES = {
    "model_type": "a mapping of fields",
    "dict_type": "a mapping of fields",
    "tuple_type": "a list",
    "list_type": "a list",
}
"""Pydantic's kinds of faults that are a value of another shape."""


class FileSection(BaseModel):
    """Unknown fields are errors; what was validated stays as it is."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def shown(value: Any) -> str:
    """Return a value as errors show it: a long one is cut."""
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"


def validated(root: type[SomeSection], data: Any, where: str) -> SomeSection:
    """Validate plain data. ConfigError lists every fault: its field, what is wrong, and what is allowed."""
    try:
        return root.model_validate(data)
    except ValidationError as error:
        # pydantic reports a union's alternatives one by one: `dict.fromkeys` drops equal messages
        faults = [_fault(dict(item), root) for item in error.errors() if not _follows(dict(item))]
        said = list(dict.fromkeys(faults))
        more = f"; and {len(said) - _MOST_FAULTS} more" if len(said) > _MOST_FAULTS else ""
        raise ConfigError(f"{where}: " + "; ".join(said[:_MOST_FAULTS]) + more) from None


def _follows(item: dict[str, Any]) -> bool:
    """Whether a list is too short for pydantic only because some of its entries are at fault, which is said of them."""
    return item["type"] == "too_short" and len(item["input"]) >= int(item["ctx"]["min_length"])


def limit_words(kind: str, item: Any) -> str | None:
    """Return what must hold where a value is out of its limits or not one of its literals, without pydantic's
    phrasing; None for other faults. `kind` and `item`: of `ValidationError.errors`."""
    if kind == "literal_error":
        return f"must be {item['ctx']['expected']}, not {shown(item['input'])}"
    if kind in _LIMITS:
        (limit,) = item["ctx"].values()
        return f"must be {_LIMITS[kind]} {limit:g}, not {shown(item['input'])}"
    return None


def _fault(item: dict[str, Any], root: type[FileSection]) -> str:
    sections, known = _sections(root, item["loc"])
    # names of a union's alternatives are no fields of the file
    path = "".join(
        f"[{part}]" if isinstance(part, int) else f".{part}"
        for part in item["loc"]
        if isinstance(part, int) or part not in known
    ).removeprefix(".")
    name = path or "the file"
    if item["type"] == "extra_forbidden":
        allowed = [field.alias or name for section in sections for name, field in section.model_fields.items()]
        close = get_close_matches(str(item["loc"][-1]), allowed, 1, 0.6)
        hint = f" (did you mean {close[0]}?)" if close else ""
        return f"{name} is not a field; allowed here: {', '.join(allowed)}{hint}"
    if item["type"] == "missing":
        return f"{name} is missing"
    if item["type"] in _SHAPES:
        return f"{name} must be {_SHAPES[item['type']]}, not {shown(item['input'])}"
    if item["type"] == "too_short":
        return f"{name} must have at least {item['ctx']['min_length']} entry"
    words = limit_words(item["type"], item)
    if words is not None:
        return f"{name} {words}"
    value, message = item.get("input"), str(item["msg"]).removeprefix("Value error, ")
    # sections and lists are too long to show, and some messages show the value
    is_now = f" (it is {shown(value)})" if not isinstance(value, dict | list) and shown(value) not in message else ""
    where = f"{path}: " if path else ""
    return f"{where}{message}{is_now}"


def _sections(root: type[FileSection], path: Sequence[int | str]) -> tuple[list[type[FileSection]], set[str]]:
    """Return the sections that a fault's field may belong to, and the names of alternatives of unions on the way."""
    sections, alternatives = [root], {"str"}
    for part in path:
        # indices, keys of mappings and names of alternatives: the same sections
        field = next((each.model_fields[part] for each in sections if part in each.model_fields), None)
        inner = models_in(field.annotation) if field is not None else []
        if inner:
            sections = inner
            alternatives |= {each.__name__ for each in inner}
    return sections, alternatives


def models_in(annotation: Any) -> list[type[FileSection]]:
    """Return the sections that an annotation names, however deep."""
    if isinstance(annotation, type) and issubclass(annotation, FileSection):
        return [annotation]
    return [found for part in getattr(annotation, "__args__", ()) for found in models_in(part)]
