//! What clients do, and what they hear.

use super::*;
use larder_base::Nanos;
use larder_engine::block::writeback::log::{MarkState, NOBODY};

impl World {
    fn op(&mut self, op: Op) -> OpId {
        self.next_op += 1;
        let id = OpId(self.next_op);
        self.ops.insert(id, op);
        id
    }

    fn some_volume(&mut self) -> usize {
        self.rng.below(self.volumes.len() as u64) as usize
    }

    /// A client issues a change.
    pub(super) fn issue(&mut self) -> Checked {
        let v = self.some_volume();
        let volume = &self.volumes[v];
        if self.ops.len() > 24 || volume.over || volume.view.is_some() || volume.aside {
            return Ok(());
        }
        let all = self.volumes[v].store.sectors();
        let first = self.rng.below(all);
        let len = [1, 1, 2, 3, 8, 9, 17, 24][self.rng.below(8) as usize];
        let sectors = first..(first + len).min(all);
        let kind = match self.rng.below(10) {
            0 => Kind::Zero,
            1 => Kind::Trim,
            _ => Kind::Write,
        };
        let fua = self.rng.chance(0.1);
        self.issue_of(v, sectors, kind, fua)
    }

    pub(super) fn issue_of(
        &mut self,
        v: usize,
        sectors: Range<u64>,
        kind: Kind,
        fua: bool,
    ) -> Checked {
        self.tick += 1;
        let number = self.writes.len() as u64;
        let (issued, level) = (self.tick, self.volumes[v].level);
        self.says(|| format!("v{v}: {number} is issued: {kind:?} {sectors:?}, FUA {fua}"));
        let (answered, done, sequence) = (NEVER, NEVER, 0);
        let at = None;
        self.writes.push(Write { sectors, kind, fua, issued, answered, at, done, level, sequence });
        let op = self.op(Op::Write(v, number));
        self.volumes[v].blocked.push_back((op, number));
        self.admit(v)
    }

    /// Changes that overlap none before them come to the log.
    pub(super) fn admit(&mut self, v: usize) -> Checked {
        let overlap = |a: &Range<u64>, b: &Range<u64>| a.start < b.end && b.start < a.end;
        let mut i = 0;
        while let Some(&(op, number)) = self.volumes[v].blocked.get(i) {
            let range = &self.writes[number as usize].sectors;
            let before = self.volumes[v].blocked.iter().take(i).map(|b| b.1);
            let under_way = self.ops.values().filter_map(|op| match op {
                Op::Write(of, n) if *of == v && self.writes[*n as usize].sequence > 0 => Some(*n),
                _ => None,
            });
            let mut others = before.chain(under_way);
            if others.any(|n| overlap(&self.writes[n as usize].sectors, range)) {
                i += 1;
                continue;
            }
            self.volumes[v].blocked.remove(i);
            self.append(v, op, number)?;
            i = 0;
        }
        Ok(())
    }

    fn append(&mut self, v: usize, op: OpId, number: u64) -> Checked {
        let write = &self.writes[number as usize];
        let mut bytes = Vec::new();
        if write.kind == Kind::Write {
            write.sectors.clone().for_each(|sector| bytes.extend(fill(v, number, sector)));
        }
        let sums: Vec<u32> = pieces::sums(&bytes).collect();
        let append = Append {
            op,
            attachment: self.volumes[v].attachment,
            kind: write.kind,
            at: write.sectors.start * SECTOR,
            len: (write.sectors.end - write.sectors.start) * SECTOR,
            bytes: (!bytes.is_empty()).then(|| Bytes(Rc::new(bytes))),
            sums: Sums::new(&sums),
            fua: write.fua,
            may_punch: false,
        };
        self.volumes[v].log.push(number);
        self.writes[number as usize].sequence = self.volumes[v].log.len() as u64;
        self.says(|| format!("v{v}: {number} comes to the log"));
        let mut asks = Asks::default();
        self.log.append(self.now, append, &mut asks);
        self.carry(asks)
    }

    pub(super) fn flush(&mut self) -> Checked {
        let v = self.some_volume();
        if self.volumes[v].over || self.volumes[v].aside {
            return Ok(());
        }
        self.tick += 1;
        let op = self.op(Op::Flush(v, self.tick));
        self.says(|| format!("v{v}: FLUSH {}", op.0));
        let mut asks = Asks::default();
        self.log.flush(self.now, self.volumes[v].attachment, op, &mut asks);
        self.carry(asks)
    }

    /// An application names a consistency point.
    pub(super) fn mark(&mut self) -> Checked {
        let v = self.some_volume();
        self.tick += 1;
        let number = self.writes.len() as u64;
        let (issued, level) = (self.tick, self.volumes[v].level);
        self.volumes[v].log.push(number);
        let sequence = self.volumes[v].log.len() as u64;
        self.says(|| format!("v{v}: {number} is a mark, {sequence}"));
        self.writes.push(Write {
            sectors: 0..0,
            kind: Kind::Mark,
            fua: true,
            issued,
            answered: NEVER,
            at: None,
            done: NEVER,
            level,
            sequence,
        });
        let mut asks = Asks::default();
        let name = number.to_string();
        let bytes = Bytes(Rc::new(name.clone().into_bytes()));
        let asked = self.log.mark(self.volumes[v].attachment, &name, bytes, &mut asks);
        match asked {
            Some(asked) => self.marks.push((v, number, asked)),
            None if self.log.closed().is_some() => {}
            None => return Err(format!("v{v}: a mark is refused")),
        }
        self.carry(asks)
    }

    /// Marks come past writes that wait at their volume's bound: they are put where they came to the log.
    pub(super) fn place_marks(&mut self) -> Checked {
        for v in 0..self.volumes.len() {
            let attachment = self.volumes[v].attachment;
            let Some(status) = self.log.status(self.now, attachment) else { continue };
            let last = (status.positions[3] as usize).min(self.volumes[v].log.len());
            for at in self.volumes[v].placed..last {
                let log = &self.volumes[v].log;
                let is_mark = |number: u64| self.writes[number as usize].kind == Kind::Mark;
                let here = self.log.is_mark(attachment, at as u64 + 1);
                if here == is_mark(log[at]) {
                    continue;
                }
                let from = log[at..].iter().position(|&number| is_mark(number));
                let Some(from) = from.filter(|_| here) else {
                    return Err(format!("v{v}: {} comes to the log before a mark", at + 1));
                };
                self.volumes[v].log[at..=at + from].rotate_right(1);
                for at in at..=at + from {
                    let number = self.volumes[v].log[at];
                    self.writes[number as usize].sequence = at as u64 + 1;
                }
            }
            self.volumes[v].placed = last.max(self.volumes[v].placed);
        }
        Ok(())
    }

    /// Who waits for marks asks for them.
    pub(super) fn hear_marks(&mut self) -> Checked {
        for (v, number, asked) in std::mem::take(&mut self.marks) {
            match self.log.mark_state(self.volumes[v].attachment, asked) {
                MarkState::Waits => self.marks.push((v, number, asked)),
                MarkState::Failed if self.log.closed().is_some() => {}
                MarkState::Failed => return Err(format!("v{v}: mark {number} has failed")),
                MarkState::Durable(sequence) => {
                    self.says(|| format!("v{v}: mark {number} is durable, {sequence}"));
                    self.tick += 1;
                    let write = &mut self.writes[number as usize];
                    if write.sequence != sequence {
                        return Err(format!("v{v}: mark {number} is called {sequence}"));
                    }
                    (write.answered, write.done) = (self.tick, write.done.min(self.tick));
                }
            }
        }
        Ok(())
    }

    /// The name of the last mark among the first so many of the log.
    pub(super) fn mark_among(&self, v: usize, most: u64) -> Option<String> {
        let log = &self.volumes[v].log;
        let log = &log[..log.len().min(most as usize)];
        let mark = log.iter().rev().find(|n| self.writes[**n as usize].kind == Kind::Mark);
        mark.map(ToString::to_string)
    }

    /// No write is answered while the oldest is older that is dirty.
    fn check_age(&self, v: usize) -> Checked {
        let volume = &self.volumes[v];
        let Some(age) = volume.age.filter(|age| age.hard) else { return Ok(()) };
        let frontier = self.log.status(self.now, volume.attachment).map_or(0, |s| s.positions[0]);
        // Marks change no bytes, and have no age.
        let behind = volume.log.iter().skip(frontier as usize).map(|n| &self.writes[*n as usize]);
        let oldest = behind.into_iter().find(|write| write.kind != Kind::Mark);
        match oldest.and_then(|oldest| oldest.at) {
            // (Of one that is put aside nothing comes to the store, and those who wait are let go.)
            Some(at) if self.now.0 > at.0 + age.most.0 && !volume.aside => {
                Err(format!("v{v}: a write is answered, the oldest was at {at:?}, of {age:?}"))
            }
            _ => Ok(()),
        }
    }

    /// A client hears what became of what it asked for.
    pub(super) fn answered(&mut self, op: OpId, failed: bool) -> Checked {
        if op == NOBODY {
            return Ok(());
        }
        let Some(asked) = self.ops.remove(&op) else {
            return Err(format!("{op:?} is answered twice"));
        };
        self.tick += 1;
        if failed {
            // (For a minute it has, or its marker was not looked at: that may take as long here.)
            let late = (self.stores_failed || self.second) && self.now >= Nanos::from_secs(60);
            if let Op::Write(v, number) = asked
                && late
            {
                // If it is in no batch it comes to none.
                let placed = self.volumes[v].placed;
                let at = self.volumes[v].log.iter().position(|&n| n == number);
                if let Some(at) = at.filter(|&at| at >= placed) {
                    self.volumes[v].log.remove(at);
                    for at in at..self.volumes[v].log.len() {
                        let number = self.volumes[v].log[at];
                        self.writes[number as usize].sequence = at as u64 + 1;
                    }
                }
                self.failed_of.insert(v);
                return Ok(());
            }
            return Err(format!("{op:?} has failed, and its store has not"));
        }
        match asked {
            Op::Flush(v, issued) => {
                self.says(|| format!("v{v}: FLUSH {} answered, failed: {failed}", op.0));
                if !failed {
                    self.volumes[v].level = self.volumes[v].level.max(issued);
                }
                Ok(())
            }
            Op::Write(v, number) => {
                self.says(|| format!("v{v}: {number} answered, failed: {failed}"));
                if !failed {
                    // FUA was shown before.
                    if !self.writes[number as usize].fua {
                        self.check_age(v)?;
                    }
                    let now = self.now;
                    let write = &mut self.writes[number as usize];
                    (write.answered, write.at) = (self.tick, Some(now));
                    write.done = write.done.min(self.tick);
                }
                self.admit(v)
            }
        }
    }

    /// The marker of a volume is written anew.
    pub(super) fn refresh(&mut self) {
        let v = self.some_volume();
        self.volumes[v].marker += 1;
        self.log.set_marker(self.volumes[v].attachment, self.volumes[v].marker);
    }

    // ---- reads ----

    /// A client begins to read.
    pub(super) fn read(&mut self) -> Checked {
        let v = self.some_volume();
        if self.volumes[v].over {
            return Ok(());
        }
        let all = self.volumes[v].store.sectors();
        let first = self.rng.below(all);
        let sectors = first..(first + self.rng.range(1, 12)).min(all);
        let mut stretches = Vec::new();
        let range = sectors.start * SECTOR..sectors.end * SECTOR;
        self.log.look(self.volumes[v].attachment, range, |found| stretches.push(found));
        self.says(|| format!("v{v}: read of {sectors:?}"));
        for found in stretches {
            let fresh = sectors_of(&found).map(|sector| self.answered_last(v, sector)).collect();
            let reading = Reading { volume: v, found, fresh };
            // Some take their time, and what they read is pinned.
            if self.rng.chance(0.5) {
                self.read_ends(&reading)?;
            } else {
                self.ios.push(Io::Read(reading));
            }
        }
        Ok(())
    }

    /// The last change of a sector that a client knows to be done.
    pub(super) fn answered_last(&self, v: usize, sector: u64) -> u64 {
        let done = |n: &&u64| {
            let write = &self.writes[**n as usize];
            write.done != NEVER && write.sectors.contains(&sector)
        };
        self.volumes[v].log.iter().rev().find(done).copied().unwrap_or(0)
    }

    /// Bytes of the log are read, and what their checksums say is checked.
    pub(super) fn piece(&self, v: usize, piece: &Piece) -> Result<Vec<u64>, String> {
        let bytes = self.device.read(piece.place, piece.bytes as usize);
        if let Err(which) = pieces::check(piece.sums.as_slice(), 0, bytes) {
            return Err(format!("v{v}: piece {which} of {piece:?} does not verify"));
        }
        let mine = &bytes[piece.skip as usize..][..piece.len as usize];
        let first = piece.at / SECTOR;
        let numbers = mine.chunks(SECTOR as usize).zip(first..).map(|(bytes, sector)| {
            let number = filled(v, sector, bytes);
            number.ok_or_else(|| format!("v{v}: sector {sector} holds bytes of no write of it"))
        });
        numbers.collect()
    }

    pub(super) fn read_ends(&mut self, reading: &Reading) -> Checked {
        let Reading { volume: v, found, fresh } = reading;
        let v = *v;
        let numbers: Vec<Option<u64>> = match found {
            Found::Unreadable(at, len) => {
                for (sector, &fresh) in sectors_of(found).zip(fresh) {
                    if !self.is_rotten(v, sector, fresh) {
                        let what = format!("{len} bytes at {at} cannot be read, not {sector}");
                        return Err(format!("v{v}: {what}, which has {fresh}"));
                    }
                }
                return Ok(());
            }
            Found::Zeros(..) => sectors_of(found).map(|_| None).collect(),
            Found::Clean(..) => {
                sectors_of(found).map(|sector| Some(self.below(v, sector))).collect()
            }
            Found::Kept(at, len, kept) => {
                let numbers = self.kept_in_memory(v, (*at, *len), kept)?;
                numbers.into_iter().map(Some).collect()
            }
            Found::Logged(piece) => {
                let rotten = sectors_of(found)
                    .zip(fresh)
                    .any(|(sector, &fresh)| self.is_rotten(v, sector, fresh));
                if rotten && self.piece(v, piece).is_err() {
                    let mut asks = Asks::default();
                    self.log.unpin(self.now, piece.pin, &mut asks);
                    return self.carry(asks);
                }
                let numbers = self.piece(v, piece)?;
                let mut asks = Asks::default();
                self.log.unpin(self.now, piece.pin, &mut asks);
                self.carry(asks)?;
                numbers.into_iter().map(Some).collect()
            }
        };
        for ((sector, number), &fresh) in sectors_of(found).zip(numbers).zip(fresh) {
            if let Some(view) = &self.volumes[v].view {
                self.check_view(v, sector, number, view[sector as usize])?;
                continue;
            }
            let Some(number) = number else {
                // Of zeros it cannot be told whose they are: of any that is not older.
                if !self.may_be_zero(v, sector, fresh) {
                    return Err(format!(
                        "v{v}: a read of sector {sector} gives zeros, {fresh} was answered"
                    ));
                }
                continue;
            };
            if self.place(v, number)? < self.place(v, fresh)? {
                return Err(format!(
                    "v{v}: a read of sector {sector} gives {number}, {fresh} was answered"
                ));
            }
            // Who has seen it knows it.
            let write = &mut self.writes[number as usize];
            self.tick += 1;
            if number > 0 && write.done == NEVER {
                write.done = self.tick;
            }
        }
        Ok(())
    }

    fn may_be_zero(&self, v: usize, sector: u64, fresh: u64) -> bool {
        let from = self.writes[fresh as usize].sequence.max(1);
        let newer = self.volumes[v].log.iter().skip(from as usize - 1);
        let mut of = newer.map(|&n| &self.writes[n as usize]);
        fresh == 0 || of.any(|w| w.kind != Kind::Write && w.sectors.contains(&sector))
    }
}

/// The sectors of a stretch.
pub(super) fn sectors_of(found: &Found<Bytes>) -> Range<u64> {
    let (at, len) = match found {
        Found::Clean(at, len)
        | Found::Zeros(at, len)
        | Found::Unreadable(at, len)
        | Found::Kept(at, len, _) => (*at, *len),
        Found::Logged(piece) => (piece.at, piece.len),
    };
    at / SECTOR..(at + len) / SECTOR
}
