"""Code that several tasks share: answering questions, figures about answers, and samples of text."""
