"""Peers, each with its best flags, around the same single-device model."""
