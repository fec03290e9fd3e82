//! Looking whether what is cached is as in the stores.

use super::*;

const MIB: u64 = 1 << 20;

/// Lines lie anywhere on the cache device; what are neighbours in the volume comes from its store in few reads. What differs is
/// found, and nothing else; and progress goes on through both halves of the work.
#[test]
fn neighbours_are_compared_together() {
    for ways in [SHAPE.ways, FULL, SPARSE] {
        let bench = bench(&[64 * MIB, 64 * MIB], 64 * MIB, Shape { ways, ..SHAPE });
        for (volume, value) in [(0, 5), (1, 6)] {
            let client = bench.client(volume);
            let mut session = client.session().unwrap();
            for at in (16 * MIB..20 * MIB).step_by(128 << 10) {
                one(&mut *session, write(at, 128 << 10, value)).outcome.unwrap();
                bench.settle();
            }
        }
        let wish = CheckWish { compare: true, ..CheckWish::default() };
        let mut steps = Vec::new();
        let report = bench.cache.check(&wish, &mut |done, of| {
            assert!(done < of, "{done} of {of}");
            steps.push(done);
            true
        });
        let report = report.unwrap();
        assert_eq!((report.faulty(), report.unanswered), (0, 0), "{report:?}");
        assert_eq!((report.compared, report.lines), (2048, 2048), "{ways}: {report:?}");
        assert!(report.store_reads <= 16, "{ways}: {report:?}");
        let slots = bench.cache.layout().slots();
        assert!(
            steps.is_sorted() && steps.last().unwrap() >= &slots,
            "{ways}: {steps:?} of {slots}"
        );

        // Behind the daemon's back; what is not cached may be anything.
        let disk = File::options().write(true).open(bench.disk(1)).unwrap();
        for at in [15 * MIB, 16 * MIB, 17 * MIB - 1, 20 * MIB - 1, 20 * MIB] {
            disk.write_all_at(&[7], at).unwrap();
        }
        let report = bench.cache.check(&wish, &mut |_, _| true).unwrap();
        let mut at: Vec<_> = report.faults.iter().map(|f| (f.volume.as_str(), f.offset)).collect();
        at.sort_unstable();
        let wrong = [16 * MIB, 17 * MIB - 4096, 20 * MIB - 4096].map(|at| ("disk1", at));
        assert_eq!((at, report.differing), (wrong.to_vec(), 3), "{ways}: {report:?}");

        // Whoever has enough of it in the midst of the second half is told so.
        let report = bench.cache.check(&wish, &mut |done, _| done < slots).unwrap();
        assert!(report.interrupted && report.lines == 2048 && report.compared == 0, "{report:?}");
    }
}
