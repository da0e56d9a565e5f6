use std::collections::BTreeMap;

use super::*;

/// A disk of a few blocks: what each layer and the image hold themselves.
#[derive(Default)]
struct Model {
    layers: Layers,
    files: BTreeMap<Option<LayerId>, BTreeMap<u8, u32>>,
    /// What each snapshot held when it was taken.
    expected: BTreeMap<SnapshotId, BTreeMap<u8, u32>>,
    /// What the guest has written.
    now: BTreeMap<u8, u32>,
    seed: u64,
}

impl Model {
    fn random(&mut self, below: usize) -> usize {
        self.seed = self.seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.seed >> 33) as usize % below.max(1)
    }

    fn content(&self, from: Option<LayerId>) -> BTreeMap<u8, u32> {
        let mut content = self.files.get(&None).cloned().unwrap_or_default();
        for layer in self.layers.chain(from).iter().rev() {
            content.extend(self.files[&Some(layer.layer)].clone());
        }
        content
    }

    fn begin(&mut self, below: Option<LayerId>) -> Layer {
        let layer = LayerId::new();
        self.files.insert(Some(layer), BTreeMap::new());
        let file = FileIdentity::in_metadata(&std::fs::metadata("/").unwrap());
        Layer { layer, below, file }
    }

    fn write(&mut self) {
        let (block, value) = (self.random(8) as u8, self.random(1 << 30) as u32);
        self.now.insert(block, value);
        self.files.entry(self.layers.active()).or_default().insert(block, value);
    }

    fn take(&mut self) {
        if !self.layers.has_room() {
            return;
        }
        let (snapshot, next) = (SnapshotId::new(), self.begin(self.layers.active()));
        self.layers.keep(snapshot, Uuid::now_v7(), next);
        self.expected.insert(snapshot, self.now.clone());
    }

    fn any_snapshot(&mut self) -> Option<SnapshotId> {
        let index = self.random(self.expected.len());
        self.expected.keys().nth(index).copied()
    }

    fn revert(&mut self) {
        let Some(snapshot) = self.any_snapshot() else { return };
        let next = self.begin(self.layers.layer_of(snapshot).unwrap());
        self.layers.stack(next);
        self.now = self.expected[&snapshot].clone();
        self.remove_unneeded();
    }

    fn drop_one(&mut self) {
        let Some(snapshot) = self.any_snapshot() else { return };
        self.expected.remove(&snapshot);
        assert!(self.layers.forget(snapshot));
        self.remove_unneeded();
    }

    fn remove_unneeded(&mut self) {
        while let Some(layer) = self.layers.unneeded() {
            self.layers.layers.retain(|known| known.layer != layer);
            self.files.remove(&Some(layer));
        }
    }

    fn merge(&mut self) {
        let Some(ToMerge { upper, .. }) = self.layers.next_merge() else { return };
        let below = self.layers.layer(upper).unwrap().below;
        let own = self.files[&Some(upper)].clone();
        self.files.entry(below).or_default().extend(own);
        // All is as it was at any time: before it is noted, too.
        self.check();
        self.layers.merged(upper);
        self.files.remove(&Some(upper));
    }

    fn check(&self) {
        assert!(self.layers.is_sound(), "{:?}", self.layers);
        assert_eq!(self.content(self.layers.active()), self.now);
        for (snapshot, expected) in &self.expected {
            let kept = self.layers.layer_of(*snapshot).unwrap();
            assert_eq!(self.content(kept), *expected, "{snapshot} in {:?}", self.layers);
            assert_ne!(Some(kept), Some(self.layers.active()), "the guest writes to a snapshot");
        }
    }
}

#[test]
fn snapshots_and_the_guest_s_disk_hold_what_they_should_whatever_is_done() {
    for seed in 1..200 {
        let mut model = Model { seed, ..Model::default() };
        for _ in 0..150 {
            match model.random(10) {
                0 | 1 => model.take(),
                2 => model.revert(),
                3 => model.drop_one(),
                4 | 5 => model.merge(),
                _ => model.write(),
            }
            model.check();
        }
        while let Some(snapshot) = model.any_snapshot() {
            model.expected.remove(&snapshot);
            model.layers.forget(snapshot);
            model.remove_unneeded();
            while model.layers.next_merge().is_some() {
                model.merge();
            }
            model.check();
        }
        while model.layers.next_merge().is_some() {
            model.merge();
        }
        assert!(model.layers.is_empty(), "seed {seed}: layers are left: {:?}", model.layers);
        assert_eq!(model.layers.active(), None);
    }
}

#[test]
fn the_active_layer_is_merged_last() {
    let mut model = Model { seed: 1, ..Model::default() };
    let [first, second] = std::array::from_fn(|_| {
        model.take();
        *model.expected.keys().last().unwrap()
    });
    model.layers.forget(first);
    let merge = model.layers.next_merge().unwrap();
    assert!(!merge.active, "the layer between the snapshots is not active");
    model.layers.merged(merge.upper);
    assert_eq!(model.layers.next_merge(), None, "the other snapshot keeps the image");
    model.layers.forget(second);
    assert!(model.layers.next_merge().unwrap().active);
}

#[test]
fn a_note_that_names_what_is_not_there_or_goes_in_circles_is_not_believed() {
    let mut model = Model { seed: 1, ..Model::default() };
    model.take();
    model.take();
    assert!(model.layers.is_sound());
    let mut circle = model.layers.clone();
    circle.layers[0].below = Some(circle.layers[1].layer);
    assert!(!circle.is_sound());
    let mut strange = model.layers.clone();
    strange.active = Some(LayerId::new());
    assert!(!strange.is_sound());
    let mut lost = model.layers.clone();
    lost.layers.remove(0);
    assert!(!lost.is_sound());
    let mut twice = model.layers.clone();
    twice.layers[1].layer = twice.layers[0].layer;
    assert!(!twice.is_sound());
}
