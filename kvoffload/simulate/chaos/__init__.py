"""Random cancels, failures, hangs and resets over real bytes, with everything checked that must stay true."""
