"""Replay of one training step of a pipeline, from the order of its actions and the seconds of each.

``pipeline_run`` plays the forwards, backwards and messages of all ranks of one pipeline; ``step`` adds the reduction of
gradients and the optimizer; ``held_memory`` gives the peak of what is kept between actions. An order of
``slapo_training.PipelineAction`` and numbers enter; times, bytes and a timeline in the format of ``engine.timeline`` leave. It
imports ``slapo_training`` alone.
"""

from .held_memory import HeldPeak, held_peaks
from .pipeline_run import PipelineRun, run_pipeline
from .step import SimulatedStep, StepCosts, simulate_step

__all__ = ["HeldPeak", "PipelineRun", "SimulatedStep", "StepCosts", "held_peaks", "run_pipeline", "simulate_step"]
