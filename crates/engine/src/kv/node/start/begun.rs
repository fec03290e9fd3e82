//! A start on flash, from the verdict on what was left to the run that owns it, in the one order in which it may go.

use larder_base::{UnixSecs, Words};
use larder_format::Superblock;

use super::dram::DramKeeper;
use super::{ANNOUNCED, CAS_OF_A_START, Left, OWNER, Shape, Warmth, cas_base};
use crate::kv::config::FlashGeometry;
use crate::kv::log::SegmentTable;

/// What a start draws.
#[derive(Clone, Copy, Debug)]
pub struct Drawn {
    /// When it began.
    pub began: UnixSecs,
    /// By chance, for the CAS.
    pub cas: u64,
    /// The number of the run, by chance; never 0.
    pub run: u64,
}

/// What a start makes durable. Each is durable when it returns.
pub trait StartIo {
    /// What ends the start.
    type Error;
    /// The data directory names this run.
    ///
    /// # Errors
    /// Why it does not: it may still name the one before.
    fn write_run(&mut self, run: u64) -> Result<(), Self::Error>;
    /// The data directory names no run: the next start knows nothing of the last.
    ///
    /// # Errors
    /// What ends the start.
    fn forget_run(&mut self) -> Result<(), Self::Error>;
    /// The flash has this superblock.
    ///
    /// # Errors
    /// What ends the start.
    fn write_superblock(&mut self, next: &Superblock) -> Result<(), Self::Error>;
    /// The clock keeps the latest time in word [`LATEST`](super::LATEST) of the memory from now on.
    fn keep_time(&mut self);
    /// No start may use the checkpoint any more.
    ///
    /// # Errors
    /// What ends the start.
    fn remove_checkpoint(&mut self) -> Result<(), Self::Error>;
    /// The memory file is void ([`void`](super::void)). What goes wrong the operator should know; the run goes on.
    fn void_memory_file(&mut self);
}

/// A start that knows how warm it is, whose run is announced in the memory and owns nothing yet: ended here, it leaves all that the
/// next one needs.
#[derive(Debug)]
pub struct Begun {
    shape: Shape,
    warmth: Warmth,
    latest: Option<UnixSecs>,
    next: Superblock,
    /// A drive is as the last run left it if it says one of these runs.
    runs: [u64; 2],
}

impl Left<'_> {
    /// Judges what the last run has left, and announces this one in the memory, whose header is `header`; `is_new` if it was just
    /// made. Where a checkpoint may be believed, `load` reads it into the memory and says when it was written.
    pub fn begin(
        &self,
        shape: Shape,
        header: &mut Words,
        is_new: bool,
        drawn: Drawn,
        load: impl FnOnce() -> Result<UnixSecs, String>,
    ) -> Begun {
        let found = [header.load(OWNER), header.load(ANNOUNCED)];
        let (warmth, latest) = self.warmth(&shape, header, is_new, load);
        let runs = match warmth {
            Warmth::Memory => found,
            Warmth::Checkpoint | Warmth::Cold(_) => [self.superblock.run; 2],
        };
        // CAS and epochs above all that an earlier start has given out, on any drive.
        let (epoch, cas) = self.above;
        let least = self.superblock.cas_base.max(cas).saturating_add(CAS_OF_A_START);
        let mut next = self.superblock.start(cas_base(drawn.began, least, drawn.cas), drawn.run);
        next.epoch = next.epoch.max(epoch + 1);
        // The superblock is about to be written: a start that is cut short is known by this.
        header.store(ANNOUNCED, next.run);
        Begun { shape, warmth, latest, next, runs }
    }
}

impl Begun {
    /// How warm the start is.
    pub fn warmth(&self) -> &Warmth {
        &self.warmth
    }

    /// Whether anything on flash is kept.
    pub fn is_warm(&self) -> bool {
        !matches!(self.warmth, Warmth::Cold(_))
    }

    /// The latest time by which the last run has judged anything: the clock of this one tells none before it.
    pub fn latest(&self) -> Option<UnixSecs> {
        self.latest
    }

    /// The superblock of this run.
    pub fn superblock(&self) -> &Superblock {
        &self.next
    }

    /// Whether a start that ends here gives the memory back: not where it is all that is left of the index.
    pub fn gives_memory_back(&self) -> bool {
        self.warmth != Warmth::Memory
    }

    /// The segment table in these words, and by which generations the entries of an index are kept: `None` where none are. What is in
    /// the words counts if the start is warm. Generations are above all that an earlier start has given out.
    pub fn table(&self, words: Words) -> (SegmentTable, Option<Vec<u64>>) {
        let mut table = match self.is_warm() {
            false => SegmentTable::create(words),
            true => SegmentTable::attach(words),
        };
        table.raise_generation(self.next.first_generation());
        let live = self.is_warm().then(|| table.live_generations());
        (table, live)
    }

    /// Whether another drive of the cache is as the last run left it, which the one that was judged is.
    pub fn agrees(&self, other: &Superblock) -> bool {
        let run = other.run != 0 && self.runs.contains(&other.run);
        match self.warmth {
            Warmth::Memory => run,
            Warmth::Checkpoint => run && other.is_clean(),
            Warmth::Cold(_) => false,
        }
    }

    /// The segment table of one of several drives in these words, whose contents count if it is as the last run left it.
    pub fn table_of(&self, words: Words, kept: bool) -> SegmentTable {
        let mut table = match kept && self.is_warm() {
            false => SegmentTable::create(words),
            true => SegmentTable::attach(words),
        };
        table.raise_generation(self.next.first_generation());
        table
    }

    /// By which generations the entries of an index are kept that leads to several drives: each its place and its table.
    pub fn generations(
        &self,
        flash: &FlashGeometry,
        tables: &[(usize, SegmentTable)],
    ) -> Option<Vec<u64>> {
        let mut all = vec![0; usize::from(flash.segments) + 1];
        for (place, table) in tables {
            let Some((own, part)) = flash.part(*place) else { continue };
            let live = table.live_generations();
            for segment in 1..=own.segments {
                all[usize::from(part.numbers.number(segment))] = live[usize::from(segment)];
            }
        }
        self.is_warm().then_some(all)
    }

    /// The run owns the flash from here on, which the words of the memory are right for. With a memory file (`keeps`) what was in that
    /// is void, and what a stop keeps in it is returned. Nobody is answered before.
    ///
    /// # Errors
    /// Those of `io`.
    pub fn take_over<I: StartIo>(
        &self,
        header: &mut Words,
        keeps: bool,
        io: &mut I,
    ) -> Result<Option<DramKeeper>, I::Error> {
        let next = &self.next;
        if io.write_run(next.run).is_err() {
            // A flash that is put back, or another one, would agree with the run before, and so would a memory file of that.
            io.forget_run()?;
        }
        io.write_superblock(next)?;
        // A kill must leave no words that are owned and do not say what has expired.
        io.keep_time();
        header.store(OWNER, next.run);
        header.store(ANNOUNCED, next.run);
        for (word, value) in self.shape.expected().into_iter().rev() {
            header.store(word, value);
        }
        io.remove_checkpoint()?;
        if keeps {
            io.void_memory_file();
        }
        Ok(keeps.then(|| DramKeeper::new(next.run, next.cas_base, Some(next.uuid))))
    }
}

#[cfg(test)]
mod tests {
    use super::super::BINDING_WORDS;
    use super::*;
    use larder_format::{Geometry, Uuid};

    /// A directory that cannot be written, or neither written nor cleared.
    #[derive(Default)]
    struct Full {
        made: Vec<&'static str>,
        stuck: bool,
    }

    impl StartIo for Full {
        type Error = ();
        fn write_run(&mut self, _: u64) -> Result<(), ()> {
            Err(())
        }
        fn forget_run(&mut self) -> Result<(), ()> {
            self.made.push("no run");
            if self.stuck { Err(()) } else { Ok(()) }
        }
        fn write_superblock(&mut self, _: &Superblock) -> Result<(), ()> {
            self.made.push("superblock");
            Ok(())
        }
        fn keep_time(&mut self) {}
        fn remove_checkpoint(&mut self) -> Result<(), ()> {
            Ok(())
        }
        fn void_memory_file(&mut self) {
            self.made.push("no memory file");
        }
    }

    /// Else a memory file of the run before, beside a flash of that time, would be believed by a later start.
    #[test]
    fn a_directory_that_cannot_name_the_run_does_not_name_the_one_before() {
        let bytes = larder_format::geometry::SEGMENTS_AT + (64 << 20);
        let geometry = Geometry::with_segment(bytes, 1 << 20).unwrap();
        let key = larder_base::HashKey([1; 16]);
        let first = Superblock::format(Uuid([1; 16]), key, geometry, UnixSecs(1));
        let shape = Shape {
            uuid: [1; 16],
            table_words: 130,
            segment_bytes: 1 << 20,
            shards: 1,
            buckets: 1,
        };
        let mut header = Words::heap(BINDING_WORDS);
        let left = Left::new(&first, false, Err("a new directory".to_owned()));
        let drawn = Drawn { began: UnixSecs(2), cas: 3, run: 4 };
        let begun = left.begin(shape, &mut header, true, drawn, || unreachable!());
        assert!(begun.gives_memory_back() && !begun.is_warm());
        let mut io = Full::default();
        assert!(begun.take_over(&mut header, true, &mut io).is_ok_and(|keeper| keeper.is_some()));
        assert_eq!(io.made, ["no run", "superblock", "no memory file"]);
        let mut io = Full { stuck: true, ..Full::default() };
        assert!(begun.take_over(&mut header, true, &mut io).is_err());
        assert_eq!(io.made, ["no run"]);
    }

    /// The latest copy of the superblock has rotted, and the one before is of the run before, which stopped in good order. The directory contradicts
    /// it: neither memory nor a checkpoint of that run is believed, though its removal may have been lost.
    #[test]
    fn the_copy_before_proves_nothing_once_the_latest_has_rotted() {
        let bytes = larder_format::geometry::SEGMENTS_AT + (64 << 20);
        let geometry = Geometry::with_segment(bytes, 1 << 20).unwrap();
        let key = larder_base::HashKey([1; 16]);
        let before = Superblock::format(Uuid([1; 16]), key, geometry, UnixSecs(1)).start(1, 4);
        let before = before.stop(1);
        let shape = Shape {
            uuid: [1; 16],
            table_words: 130,
            segment_bytes: 1 << 20,
            shards: 1,
            buckets: 1,
        };
        let drawn = |run| Drawn { began: UnixSecs(2), cas: 3, run };
        let last = |run| super::super::LastRun { run, proves_checkpoint: Ok(()) };
        let warmth = |header: &mut Words, is_new, run| {
            let last = last(run);
            let left = Left::new(&before, false, Ok(&last));
            left.begin(shape, header, is_new, drawn(9), || Ok(UnixSecs(1))).warmth
        };
        // Memory of the run after it, and none.
        let mut header = Words::heap(BINDING_WORDS);
        for (word, value) in shape.expected().into_iter().chain([(OWNER, 5), (ANNOUNCED, 5)]) {
            header.store(word, value);
        }
        assert!(matches!(warmth(&mut header, false, 5), Warmth::Cold(_)));
        let mut none = Words::heap(BINDING_WORDS);
        assert!(matches!(warmth(&mut none, true, 5), Warmth::Cold(_)));
        // (Nothing has followed it.)
        assert_eq!(warmth(&mut none, true, 4), Warmth::Checkpoint);
    }
}
