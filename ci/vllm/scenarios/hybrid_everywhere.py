"""Predictions for a hybrid model are what vLLM finds, when it keeps the windows of every block."""

from engines import LAYOUTS
from scenarios import hybrid

LAYOUT = LAYOUTS["hybrid_everywhere"]


def scenario(stage):
    hybrid.scenario(stage)
