"""Visual question answering: image encoders, question encoders and attention."""
