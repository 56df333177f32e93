"""The parallel axes: each takes a module tree and makes its result equal the single-device model's."""
