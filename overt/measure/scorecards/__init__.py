"""One scorecard for any model and any map: what to ask, of which maps, how sure one can be."""
