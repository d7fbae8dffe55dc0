"""Language models as judges: the endpoint, rubrics, scores, utilities from comparisons, and an audit of the judge."""
