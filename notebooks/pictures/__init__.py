"""What happened, as pictures: the rounds of a real run, probabilities, draft trees and times.

Matplotlib where a picture is looked at, Plotly where it is asked. Every function takes numbers that somebody else
measured and returns a figure; none of them runs a model. Needs the extra ``notebooks``.
"""
