//! Developer chores.

fn main() {}
