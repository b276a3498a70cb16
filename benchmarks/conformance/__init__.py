"""Losses and advantages compared with those of TRL and verl: python -m benchmarks.conformance"""
