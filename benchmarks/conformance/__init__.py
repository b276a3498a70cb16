"""Compares losses and advantages with TRL and verl: python -m benchmarks.conformance"""
