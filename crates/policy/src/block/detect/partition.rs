//! Partition tables: MBR and GPT.

use super::bytes::{le32, le64, u8_at};

/// Partitions that are looked at, of one volume.
pub(super) const MOST_PARTITIONS: usize = 128;

/// A partition of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Partition {
    /// Its number, from 1, as Linux counts.
    pub number: u32,
    /// First byte.
    pub start: u64,
    /// How many bytes.
    pub bytes: u64,
}

/// Bytes from the start of a volume that hold a partition table.
pub const PARTITION_TABLE_BYTES: usize = 24 << 10;

/// The partitions that a volume's first [`PARTITION_TABLE_BYTES`] list: GPT, or the primary ones of an MBR. Empty where
/// there is no partition table. Logical partitions inside an extended one are not looked for.
pub fn partitions(head: &[u8]) -> Vec<Partition> {
    mbr(head).unwrap_or_default()
}

fn mbr(head: &[u8]) -> Option<Vec<Partition>> {
    if head.get(510..512)? != [0x55, 0xaa] {
        return None;
    }
    let mut found = Vec::new();
    for number in 1..=4u32 {
        let entry = head.get(446 + 16 * (number as usize - 1)..)?;
        let (status, kind) = (u8_at(entry, 0)?, u8_at(entry, 4)?);
        // A boot sector of another kind has code here.
        if status & 0x7f != 0 {
            return None;
        }
        match kind {
            0 | 0x05 | 0x0f | 0x85 => continue,
            0xee => return gpt(head),
            _ => {}
        }
        let (start, sectors) = (u64::from(le32(entry, 8)?), u64::from(le32(entry, 12)?));
        if start > 0 && sectors > 0 {
            found.push(Partition { number, start: start * 512, bytes: sectors * 512 });
        }
    }
    Some(found)
}

fn gpt(head: &[u8]) -> Option<Vec<Partition>> {
    // The header is in the second sector, whose size is not written anywhere.
    let sector = [512u64, 4096].into_iter().find(|&sector| {
        head.get(sector as usize..).is_some_and(|header| header.starts_with(b"EFI PART"))
    })?;
    let header = head.get(sector as usize..)?;
    let table = le64(header, 72)?.checked_mul(sector)?;
    let (count, size) = (le32(header, 80)?, le32(header, 84)?);
    if !(128..=4096).contains(&size) {
        return None;
    }
    let mut found = Vec::new();
    for number in 1..=count.min(MOST_PARTITIONS as u32) {
        let at = table.checked_add(u64::from(number - 1) * u64::from(size))?;
        let Some(entry) = head.get(usize::try_from(at).ok()?..) else { break };
        let (Some(kind), Some(first), Some(last)) =
            (entry.get(..16), le64(entry, 32), le64(entry, 40))
        else {
            break;
        };
        if kind.iter().all(|&b| b == 0) || last < first || first == 0 {
            continue;
        }
        let (start, end) = (first.checked_mul(sector), last.checked_add(1)?.checked_mul(sector));
        if let (Some(start), Some(end)) = (start, end) {
            found.push(Partition { number, start, bytes: end - start });
        }
    }
    Some(found)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// An MBR with these partitions, in sectors of 512.
    pub(in super::super) fn mbr_of(parts: &[(u8, u32, u32)]) -> Vec<u8> {
        let mut head = vec![0u8; PARTITION_TABLE_BYTES];
        head[510..512].copy_from_slice(&[0x55, 0xaa]);
        for (i, &(kind, start, sectors)) in parts.iter().enumerate() {
            let at = 446 + 16 * i;
            head[at + 4] = kind;
            head[at + 8..at + 12].copy_from_slice(&start.to_le_bytes());
            head[at + 12..at + 16].copy_from_slice(&sectors.to_le_bytes());
        }
        head
    }

    fn gpt_of(sector: usize, parts: &[(u64, u64)]) -> Vec<u8> {
        let mut head = mbr_of(&[(0xee, 1, u32::MAX)]);
        head[sector..sector + 8].copy_from_slice(b"EFI PART");
        head[sector + 72..sector + 80].copy_from_slice(&2u64.to_le_bytes());
        head[sector + 80..sector + 84].copy_from_slice(&128u32.to_le_bytes());
        head[sector + 84..sector + 88].copy_from_slice(&128u32.to_le_bytes());
        for (i, (first, last)) in parts.iter().enumerate() {
            let at = 2 * sector + 128 * i;
            head[at] = if *first == 0 { 0 } else { 7 };
            head[at + 32..at + 40].copy_from_slice(&first.to_le_bytes());
            head[at + 40..at + 48].copy_from_slice(&last.to_le_bytes());
        }
        head
    }

    #[test]
    fn mbr_and_gpt() {
        let head = mbr_of(&[(0x83, 2048, 1000), (0x05, 5000, 10), (0x83, 4000, 8)]);
        let wanted = [
            Partition { number: 1, start: 2048 * 512, bytes: 512_000 },
            Partition { number: 3, start: 4000 * 512, bytes: 4096 },
        ];
        assert_eq!(partitions(&head), wanted);
        for sector in [512usize, 4096] {
            let s = sector as u64;
            let found = partitions(&gpt_of(sector, &[(256, 511), (0, 0), (512, 512)]));
            assert_eq!(found[0], Partition { number: 1, start: 256 * s, bytes: 256 * s });
            assert_eq!(found[1], Partition { number: 3, start: 512 * s, bytes: s });
        }
    }

    #[test]
    fn what_is_no_table_has_no_partitions() {
        assert!(partitions(&[]).is_empty());
        assert!(partitions(&[0; 4096]).is_empty());
        let mut boot = mbr_of(&[(0x83, 1, 1)]);
        boot[446] = 0x41;
        assert!(partitions(&boot).is_empty());
        assert!(partitions(&mbr_of(&[(0xee, 1, 1)])[..4096]).is_empty());
        let huge = gpt_of(512, &[(u64::MAX, u64::MAX), (5, 4), (1 << 60, 1 << 61)]);
        assert!(partitions(&huge).is_empty());
    }
}
