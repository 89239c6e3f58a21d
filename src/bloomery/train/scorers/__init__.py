"""Processes that score while training ranks train: a teacher and reward models on devices of their own."""
