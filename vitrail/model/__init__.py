"""Batches → tokens → logits: every model of the paper, from one table of variants."""

from vitrail.model.classifier import Classifier as Classifier
from vitrail.model.variants import Architecture as Architecture
from vitrail.model.variants import build as build
from vitrail.model.variants import build_meta as build_meta
from vitrail.model.variants import create as create
from vitrail.model.variants import parse_variant as parse_variant
