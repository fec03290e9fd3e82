//! What the tests of this crate need beside cargo.

#[path = "../../tests/lib/foreign.rs"]
mod foreign;

fn main() {
    foreign::declare(&["mkfs.ext4", "debugfs"]);
}
