"""Helpers of the tests: real servers, made-up data, small runs."""
