//! What the tests of this crate need beside cargo.

#[path = "../../tests/lib/foreign.rs"]
mod foreign;

fn main() {
    foreign::declare(&["mkfs.ext4", "dumpe2fs", "debugfs", "mkfs.xfs", "xfs_db"]);
}
