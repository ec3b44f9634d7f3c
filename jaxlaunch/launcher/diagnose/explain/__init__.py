"""`launcher explain`: the situation of a job, the evidence for it, and the next step."""
