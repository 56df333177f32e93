"""Training: data, step, optimizer, loop and the comparison with one process.  Import the module you need."""
