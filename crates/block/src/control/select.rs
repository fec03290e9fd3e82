//! `pin`, `never`, `unpin` and `rules`.

use larder_base::ByteSize;
use larder_policy::block::Rule;
use serde_json::{Value, json};

use super::protocol::Refusal;
use super::refused;
use crate::cache::Core;

/// What is to be selected.
pub(super) struct Wanted {
    pub rule: Option<String>,
    pub ranges: Option<Vec<(u64, u64)>>,
    pub partition: Option<u32>,
    pub label: String,
    pub disk_bytes: Option<u64>,
}

fn usage(message: String) -> Refusal {
    Refusal { message, usage: true }
}

/// More is pinned than is kept.
pub(super) fn too_much(pinned: u64, most: u64) -> String {
    format!(
        "{} are pinned and {} can be kept in this cache: what is pinned is admitted always, but not kept from being evicted, \
         until less is",
        ByteSize(pinned),
        ByteSize(most)
    )
}

pub(super) fn select(cache: &Core, volume: &str, wanted: Wanted) -> Result<Value, Refusal> {
    let rule: Option<Rule> = wanted
        .rule
        .as_deref()
        .map(str::parse)
        .transpose()
        .map_err(|e: larder_policy::block::SelectionError| usage(e.to_string()))?;
    let attached = cache.attached(volume)?;
    if let Some(disk) = wanted.disk_bytes
        && disk != attached.bytes()
    {
        return Err(refused(format!(
            "volume '{volume}' has {} bytes, and the disk that the file lies on has {disk}: name the volume that is mounted there",
            attached.bytes()
        )));
    }
    let mut label = wanted.label;
    let mut ranges = wanted.ranges;
    if let Some(number) = wanted.partition {
        let all = cache.partitions(volume)?;
        let found = all.iter().find(|p| p.number == number);
        let Some(found) = found else {
            let known: Vec<String> = all.iter().map(|p| p.number.to_string()).collect();
            return Err(refused(match known.len() {
                0 => format!("volume '{volume}' has no partition table (GPT or MBR)"),
                _ => format!(
                    "volume '{volume}' has no partition {number}: it has {}",
                    known.join(", ")
                ),
            }));
        };
        ranges = Some(vec![(found.start, found.bytes)]);
        if label.is_empty() {
            label = format!("partition {number}");
        }
    }
    let asked = ranges.as_ref().map(Vec::len);
    let before = (cache.selection(volume)?, cache.selected_of(&attached).0);
    let answer = |ranges: u64, dropped: u64| {
        let (pinned, most) = cache.pinned();
        // (Somebody else may have selected in between: then something has changed.)
        let now = cache.selection(volume).map(|all| (all, cache.selected_of(&attached).0));
        json!({
            "volume": volume,
            "asked_ranges": asked,
            "changed": now.map_or(true, |now| now != before),
            "ranges": ranges,
            "dropped_lines": dropped,
            "pinned_bytes": pinned,
            "pinned_most_bytes": most,
            "warning": (pinned > most && rule == Some(Rule::Always)).then(|| too_much(pinned, most)),
        })
    };
    if rule.is_none() && wanted.partition.is_none() && ranges.is_none() && !label.is_empty() {
        let gone = cache.unselect_label(volume, &label)?;
        if gone == 0 {
            return Err(refused(format!(
                "nothing of volume '{volume}' is selected as '{label}': `larder block rules {volume}` lists what is"
            )));
        }
        return Ok(answer(cache.selected_of(&attached).1, 0));
    }
    let (count, dropped) = cache.select(volume, rule, ranges.as_deref(), &label)?;
    Ok(answer(count, dropped))
}

pub(super) fn selected(cache: &Core, volume: &str) -> Result<Value, Refusal> {
    let attached = cache.attached(volume)?;
    let ranges = cache.selection(volume)?;
    let (whole, _) = cache.selected_of(&attached);
    let ranges: Vec<Value> = ranges
        .into_iter()
        .map(|(start, end, rule, label)| {
            json!({ "start": start, "end": end, "rule": rule, "label": label })
        })
        .collect();
    Ok(json!({ "volume": volume, "whole": whole.as_str(), "ranges": ranges }))
}
