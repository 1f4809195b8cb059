"""The description of an experiment: what is trained, what varies, and which claims it tests.

An experiment is a TOML file in `experiments/`: a grid of rows and columns, each with settings on
top of a recipe. `scales.toml` holds what all experiments have in common at a scale.
"""

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from vitrail.console import print_table
from vitrail.errors import VitrailError, did_you_mean, one_line

EXPERIMENTS = Path(str(files("vitrail.reproduction"))) / "experiments"
_SCALES = EXPERIMENTS / "scales.toml"
Measure = Literal["fewshot", "inspection", "real", "shape", "speed"]
WITHOUT_VIT: Mapping[str, Any] = {
    **dict.fromkeys(("model.width", "model.depth", "model.heads", "model.mlp"), 0),
    **dict.fromkeys(("model.pool", "model.positions", "model.injection"), ""),
}
"""No settings that only ViTs have."""
BETWEEN = " | "
"""Separates the row and the column of a cell."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A training run that starts from the weights of the one before it."""

    recipe: str = ""
    """Empty: the recipe and the settings of the scale."""
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A row or a column: settings on top of those of the scale."""

    name: str
    recipe: str = ""
    """In place of the recipe of the scale."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    then: tuple[Stage, ...] = ()
    """Further stages: fine-tuning."""
    columns: tuple[str, ...] = ()
    """The columns of a row; empty: all of them."""
    lines: tuple[str, ...] = ()
    """The lines of a chart that pass through a row; empty: one line along its columns."""
    grid: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Values for the last stage, chosen on val."""
    alternatives: tuple[str, ...] = ()
    """Recipes that are tried on val beside that of the last stage, on the same data."""
    x: float | None = None
    """Where a column is on the axis; of a row, where its cell in the first column is."""
    group: str = ""
    """Columns of a group also have their mean in the table."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A sentence of the paper, and the test that decides it (see `claims.py`)."""

    text: str
    paper: str
    """What the paper found."""
    test: str
    pairs: tuple[tuple[str, str], ...] = ()
    """Cells, rows or lines to compare: the first with the second."""
    of: tuple[str, ...] = ()
    """Cells, rows or lines that are tested one by one; empty: all."""
    expected: Mapping[str, float] = field(default_factory=dict)
    """Figures of the paper by cell."""
    margin: float = 0.0
    measure: str = ""
    """Empty: the experiment's."""
    scales: tuple[str, ...] = ()
    """Where the results can decide it; empty: at every scale."""


@dataclass(frozen=True, kw_only=True)
class PaperResult:
    """What the paper printed: a table, or the points of a figure."""

    caption: str = ""
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    """Cells, the first of which is the name of the row."""
    points: tuple[tuple[str, float, float], ...] = ()
    """Line, x and y."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """The size of an experiment: what replaces or adds to the rest of its description."""

    about: str = ""
    recipe: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    seeds: int = 0
    rows: tuple[Arm, ...] = ()
    columns: tuple[Arm, ...] = ()
    grid: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Values for the last stage of every cell, chosen on val."""
    transfer: Stage = field(default_factory=Stage)
    """What further stages without a recipe have in common: a recipe in place of the scale's, or
    settings on top of the scale's."""
    measure: str = ""
    """In place of the experiment's measure."""
    measures: tuple[Measure, ...] = ()
    images: Mapping[str, int] = field(default_factory=dict)
    """Training images of datasets, for the plan."""
    note: str = ""
    """How this differs from the paper."""
    quiet: bool = False
    """Print one line for a run in place of its log."""
    benchmark_seconds: float = 5.0
    """For the speed of one model."""
    pretrain_once: bool = False
    """Only the last stage is repeated with every seed, as in the paper."""
    train: bool = True
    """Train models, if the experiment does."""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One or more tables and figures of the paper."""

    name: str
    title: str
    about: str
    """What the paper did."""
    also: tuple[str, ...] = ()
    """Other names: the tables and figures that it covers."""
    train: bool = True
    """Train models; otherwise they are measured as they are built or loaded."""
    measure: str = "top1"
    """The figure in each cell."""
    measures: tuple[Measure, ...] = ()
    """What is measured besides accuracy on test."""
    form: Literal["table", "chart", "curve"] = "table"
    """curve: over the epochs of training."""
    average: bool = False
    """Columns are datasets, and a row stands for the mean over them."""
    x: tuple[str, ...] = ()
    """The measures on the axes of its charts, of which claims use the first; empty: the `x` of the
    columns."""
    x_label: str = ""
    recipe: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    rows: tuple[Arm, ...] = ()
    columns: tuple[Arm, ...] = ()
    note: str = ""
    """How all scales without a note differ from the paper."""
    claims: tuple[Claim, ...] = ()
    published: PaperResult = field(default_factory=PaperResult)
    scales: Mapping[str, Scale]

    def at(self, name: str) -> "Design":
        """The experiment at a scale."""
        if name not in self.scales:
            scales = ", ".join(self.scales)
            raise VitrailError(f"{self.name} has no scale '{name}'; it has {scales}")
        own, shared = self.scales[name], shared_scales()[name]
        if own.seeds < 0:
            raise VitrailError(f"{self.name}: scales.{name}.seeds = {own.seeds}")
        recipe = own.recipe or self.recipe
        merged = replace(
            own,
            # What is only counted or measured has no use for the scale's data.
            about=own.about or (shared.about if self.train and own.train else ""),
            recipe=recipe or shared.recipe,
            settings={**({} if recipe else shared.settings), **self.settings, **own.settings},
            note=own.note or self.note,
            seeds=own.seeds or shared.seeds,
            images={**shared.images, **own.images},
            quiet=shared.quiet,
            benchmark_seconds=shared.benchmark_seconds,
            pretrain_once=own.pretrain_once or shared.pretrain_once,
        )
        own_measure = own.measure or self.measure
        design = Design(
            experiment=replace(
                self,
                train=self.train and own.train,
                measure=own_measure,
                measures=(*self.measures, *own.measures),
            ),
            name=name,
            scale=merged,
            rows=own.rows or self.rows,
            columns=own.columns or self.columns or (Arm(name=""),),
            claims=tuple(
                replace(claim, measure=claim.measure or own_measure)
                for claim in self.claims
                if name in (claim.scales or (name,))
            ),
        )
        _check_arms(design)
        _check_recipes(design)
        _check_axis(design)
        _check_measures(design)
        return design


@dataclass(frozen=True)
class Cell:
    """A row and a column."""

    row: Arm
    column: Arm

    @property
    def name(self) -> str:
        return BETWEEN.join(filter(None, (self.row.name, self.column.name)))


@dataclass(frozen=True, kw_only=True)
class Design:
    """An experiment at one scale: its cells."""

    experiment: Experiment
    name: str
    scale: Scale
    rows: tuple[Arm, ...]
    columns: tuple[Arm, ...]
    claims: tuple[Claim, ...]

    @property
    def seeds(self) -> int:
        """Results of each cell; what is not trained is measured once."""
        return self.scale.seeds if self.experiment.train else 1

    @property
    def cells(self) -> list[Cell]:
        return [
            Cell(row, column)
            for row in self.rows
            for column in self.columns
            if column.name in (row.columns or (column.name,))
        ]

    def stages(self, cell: Cell) -> list[Stage]:
        """The training runs of a cell, with all their settings.

        Without a recipe of its own, as where published weights replace pre-training, the first of
        the further stages comes first.
        """
        row, column, scale = cell.row, cell.column, self.scale
        recipe, own = (
            column.recipe or row.recipe or scale.recipe,
            {**row.settings, **column.settings},
        )
        # The scale may have settings of ViTs, whose variants have a slash in their name.
        is_vit = "/" in own.get("model.variant", "/")
        settings = {**scale.settings, **({} if is_vit else WITHOUT_VIT), **own}
        further = [self._complete(stage) for stage in (*row.then, *column.then)]
        if recipe:
            return [Stage(recipe=recipe, settings=settings), *further]
        first = further[0]
        return [replace(first, settings={**first.settings, **settings}), *further[1:]]

    def _complete(self, stage: Stage) -> Stage:
        if stage.recipe:
            return stage
        scale, shared = self.scale, self.scale.transfer
        settings = shared.settings if shared.recipe else {**scale.settings, **shared.settings}
        return Stage(recipe=shared.recipe or scale.recipe, settings={**settings, **stage.settings})

    @property
    def points(self) -> list["Point"]:
        """What is compared: the cells, or the rows where a row stands for the mean of its cells."""
        if not self.experiment.average:
            return [Point((cell,)) for cell in self.cells]
        rows = ([cell for cell in self.cells if cell.row is row] for row in self.rows)
        return [Point(tuple(cells)) for cells in rows]

    def lines(self) -> dict[str, list["Point"]]:
        """The lines of a chart."""
        lines: dict[str, list[Point]] = {}
        for point in self.points:
            row = point.cells[0].row
            for line in row.lines or (row.name,):
                lines.setdefault(line, []).append(point)
        return lines

    def select(self, name: str) -> list["Point"]:
        """The points of a name: that of a cell, a row or a line."""
        exact = [point for point in self.points if point.name == name]
        found = exact or [point for point in self.points if point.cells[0].row.name == name]
        found = found or self.lines().get(name, [])
        if not found:
            known = [*(point.name for point in self.points), *self.lines()]
            raise VitrailError(
                f"{self.experiment.name} has no '{name}' at this scale{did_you_mean(name, known)}"
            )
        return found


@dataclass(frozen=True)
class Point:
    """One or more cells whose mean is compared."""

    cells: tuple[Cell, ...]

    @property
    def name(self) -> str:
        return self.cells[0].name if len(self.cells) == 1 else self.cells[0].row.name


# Checks


_MEASURED_BY: Mapping[str, str] = {
    "fewshot": "fewshot",
    "distance_growth": "inspection",
    "head_spread_fall": "inspection",
    "most_local_head": "inspection",
    "row_column_similarity": "inspection",
    "real": "real",
    "layers": "shape",
    "width": "shape",
    "mlp": "shape",
    "heads": "shape",
    "images_per_second": "speed",
    "largest_batch": "speed",
}
"""Figures that need an entry in `measures`."""
_OF_ALL = ("parameters", "gmacs")
_OF_TRAINED = (
    *("top1", "val_top1", "exaflops", "compute", "device_days", "pretraining_device_days"),
    *("energy_joules", "peak_memory_bytes", "seconds"),
)


def known_measures(experiment: Experiment) -> list[str]:
    """The figures that the results of an experiment have."""
    listed = [name for name, by in _MEASURED_BY.items() if by in experiment.measures]
    return [*(_OF_TRAINED if experiment.train else ()), *_OF_ALL, *listed]


def _check_measures(design: Design) -> None:
    experiment, known = design.experiment, known_measures(design.experiment)
    if not experiment.train and (wrong := {"fewshot", "real"} & set(experiment.measures)):
        raise VitrailError(f"{experiment.name} trains nothing to measure {min(wrong)} of")
    of_claims = (claim.measure for claim in design.claims)
    for name in filter(None, (experiment.measure, *experiment.x, *of_claims)):
        if name not in known:
            by = _MEASURED_BY.get(name)
            hint = f'; add measures = ["{by}"]' if by else did_you_mean(name, known)
            raise VitrailError(f"{experiment.name} does not measure '{name}'{hint}")


def _check_arms(design: Design) -> None:
    """Rows and columns have names of their own, and there are some."""
    where = design.experiment.name
    for kind, arms in (("row", design.rows), ("column", design.columns)):
        names = [arm.name for arm in arms]
        if len(set(names)) < len(names) or (kind == "row" and "" in names):
            raise VitrailError(f"{where}: each {kind} needs a name of its own, not {names}")
    columns = [column.name for column in design.columns]
    for row in design.rows:
        for name in row.columns:
            if name not in columns:
                hint = did_you_mean(name, columns)
                raise VitrailError(f"{where}: '{row.name}' has no column '{name}'{hint}")
    if not design.cells:
        raise VitrailError(f"{where} has no rows at the scale {design.name}")


def _check_recipes(design: Design) -> None:
    for cell in design.cells:
        row, column = cell.row, cell.column
        if not (row.recipe or column.recipe or design.scale.recipe or row.then or column.then):
            raise VitrailError(
                f"{design.experiment.name}: '{row.name}' has no recipe at the scale {design.name}"
            )


def _check_axis(design: Design) -> None:
    for arm in (*design.rows, *design.columns):
        if arm.x is not None and not 0 < arm.x < math.inf:
            raise VitrailError(
                f"{design.experiment.name}: x = {arm.x:g} of '{arm.name}' is not above zero; "
                "lines are compared along its logarithm"
            )


# Reading


def experiment_names() -> list[str]:
    """The experiments of the package, in the order of the paper."""
    return list(_read(_SCALES)["experiments"])


def list_experiments() -> list[dict[str, Any]]:
    """The experiments of the package, with their scales and claims."""
    return [
        {
            "name": experiment.name,
            "also": list(experiment.also),
            "title": experiment.title,
            "scales": list(experiment.scales),
            "claims": [claim.text for claim in experiment.claims],
        }
        for experiment in map(load_experiment, experiment_names())
    ]


def show_experiments(rows: Sequence[dict[str, Any]]) -> None:
    columns = ("name", "claims", "what", "scales")
    print_table(
        columns,
        [
            (one["name"], str(len(one["claims"])), one["title"], ", ".join(one["scales"]))
            for one in rows
        ],
    )


def load_experiment(name: str) -> Experiment:
    """An experiment by its name, by a table or figure that it covers, or from a TOML file."""
    if name.endswith(".toml"):
        return _read_experiment(Path(name))
    known = _known_experiments()
    if name not in known:
        hint = did_you_mean(name, list(known)) or "; `vitrail paper` lists them"
        raise VitrailError(f"no experiment named '{name}'{hint}")
    return known[name]


@cache
def _known_experiments() -> dict[str, Experiment]:
    """Those of the package, by all of their names."""
    known: dict[str, Experiment] = {}
    for name in experiment_names():
        experiment = _read_experiment(EXPERIMENTS / f"{name}.toml")
        known |= dict.fromkeys((name, *experiment.also), experiment)
    return known


@cache
def shared_scales() -> dict[str, Scale]:
    """What all experiments have in common, by scale."""
    scales = _read(_SCALES)["scales"]
    return {name: _build(Scale, table, name) for name, table in scales.items()}


def _read_experiment(path: Path) -> Experiment:
    experiment = _build(Experiment, _read(path) | {"name": path.stem}, str(path))
    if path.stem == "index":
        raise VitrailError(f"{path}: index.html is the scoreboard; give the file another name")
    for scale in experiment.scales:
        if scale not in shared_scales():
            raise VitrailError(
                f"{path}: unknown scale '{scale}'; one of {', '.join(shared_scales())}"
            )
    for claim in experiment.claims:
        for scale in claim.scales:
            if scale not in experiment.scales:
                raise VitrailError(f"{path}: the claim '{claim.text}' has no scale '{scale}'")
    return experiment


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise VitrailError(f"cannot read {path}: {one_line(error)}") from None


def _build(kind: Any, value: Any, where: str) -> Any:
    """A value of a TOML file as `kind`; an error says where it does not fit."""
    if is_dataclass(kind) and isinstance(value, dict):
        return _build_fields(kind, value, where)
    origin, inner = get_origin(kind), get_args(kind)
    if origin is tuple and isinstance(value, list):
        kinds = inner if inner[-1] is not ... else inner[:1] * len(value)
        if len(kinds) == len(value):
            return tuple(map(_build, kinds, value, [where] * len(value)))
    if origin is Mapping and isinstance(value, dict):
        return {key: _build(inner[1], one, f"{where}: {key}") for key, one in value.items()}
    if origin is Literal and value in inner:
        return value
    if float in (kind, *inner) and type(value) in (int, float):
        return float(value)
    if kind is Any or type(value) is kind:
        return value
    raise VitrailError(f"{where} = {value!r} is not what was expected")


def _build_fields(kind: Any, table: Mapping[str, Any], where: str) -> Any:
    types = get_type_hints(kind)
    for name in table:
        if name not in types:
            raise VitrailError(f"{where}: unknown key '{name}'{did_you_mean(name, list(types))}")
    required = {one.name for one in fields(kind) if one.default is one.default_factory is MISSING}
    if missing := sorted(required - table.keys()):
        raise VitrailError(f"{where}: {missing[0]} is missing")
    title = f"{where}: {table['name']}" if "name" in table else where
    return kind(**{name: _build(types[name], v, f"{title}: {name}") for name, v in table.items()})
