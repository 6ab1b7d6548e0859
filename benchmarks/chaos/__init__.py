"""Faults in any order: one training on two simulated machines, disturbed and restarted, checked after each fault.

`python -m benchmarks.chaos` runs it. cluster.py starts the training on the machines and stops it, faults.py has the
faults, oracle.py the checks, and __main__.py draws the rounds and prints the table.
"""
