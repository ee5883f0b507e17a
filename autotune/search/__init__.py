"""Joint search of a training step's settings (`tune --explore`)."""
