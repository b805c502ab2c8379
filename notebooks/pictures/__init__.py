"""Pictures of the notebooks and pages: recorded rounds, distributions, draft trees and times.

Static pictures use Matplotlib, interactive ones Plotly or plain JavaScript. Every function takes
measured numbers and returns a figure. No function runs a model. Needs the extra ``notebooks``.
"""
