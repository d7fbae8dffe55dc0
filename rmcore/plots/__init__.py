"""Every figure of a run. Each module has a builder (`..._figure`, a Figure to inspect) and a writer (a PNG on disk).

training.training_curves · margins.margin_histogram · calibration.reliability_diagram · length.reward_by_length ·
context.accuracy_in_context (these four also from evaluation) · trajectory.curvature_trajectory ·
curvature.draw_curvature (landscape, gauss_newton, density, layers, slices: all that was measured of a curvature).
Nothing is imported here, so that numbers.py stays free of matplotlib.
"""
