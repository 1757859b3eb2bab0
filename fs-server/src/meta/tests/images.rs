//! Images of pages: after any crash an image is there if its batch is, and gone if a batch that voids it is there.

use super::super::{
    CutStep, DataCommit, Images, MemoryStore, Meta, PageImage, REAP_BATCH_EXTENTS, RangeUpdate, StoredImage,
    Survey, image_count,
};
use super::crash::{copy_files, open};
use super::{HASH_KEY, ROOT_USER, World, extent, format};
use cuttlefs_common::attr::SetAttr;
use cuttlefs_common::ids::{FilePage, InodeNo, PAGE_SIZE, PAGE_SIZE_U64, PoolPage};
use cuttlefs_common::region::{Extent, ExtentState};
use cuttlefs_common::status::Status;
use proptest::prelude::*;
use std::fs;
use std::sync::Arc;

const ROOT: InodeNo = InodeNo::ROOT;

fn range(first: u64, end: u64, extents: Vec<Extent>) -> RangeUpdate {
    RangeUpdate { first: FilePage(first), end: FilePage(end), extents }
}

fn image(page: u64) -> PageImage {
    PageImage { page: FilePage(page), bytes: vec![page as u8 + 1; 100] }
}

/// Gives bytes to the pages `[first, end)`, with images.
fn put(meta: &Meta, ino: InodeNo, first: u64, end: u64) {
    let ranges = vec![range(first, end, vec![extent(first, 1000 * ino.0 + first, end - first)])];
    let images = Images::Put((first..end).map(image).collect());
    let size = end.max(meta.attr(ino).expect("attr").size / PAGE_SIZE_U64) * PAGE_SIZE_U64;
    let commit = DataCommit { images, ..DataCommit::of_ranges(ino, ranges, size) };
    meta.commit_data(&[commit]).expect("commit");
}

fn pages(meta: &Meta) -> Vec<(u64, u64)> {
    let images = meta.images(None, usize::MAX).expect("images");
    images.iter().for_each(|image| assert!(image.pool_page.is_some(), "{image:?}"));
    images.iter().map(|image| (image.ino.0, image.page.0)).collect()
}

fn of(ino: InodeNo, pages: impl IntoIterator<Item = u64>) -> Vec<(u64, u64)> {
    pages.into_iter().map(|page| (ino.0, page)).collect()
}

#[test]
fn what_takes_bytes_from_pages_takes_their_images() {
    let world = World::new();
    let ino = world.file(ROOT, "file");
    put(&world.meta, ino, 0, 10);
    let found = world.meta.images(None, 3).expect("images");
    let expected = |page: u64| StoredImage {
        ino,
        page: FilePage(page),
        pool_page: Some(PoolPage(1000 * ino.0 + page)),
        bytes: vec![page as u8 + 1; 100],
    };
    assert_eq!(found, [0, 1, 2].map(expected));
    assert_eq!(world.meta.images(Some((ino, FilePage(8))), 3).expect("images"), [expected(9)]);
    world.assert_sound();

    // A page gets newer bytes, and a newer image in place of the old one.
    put(&world.meta, ino, 4, 5);
    assert_eq!(pages(&world.meta), of(ino, 0..10));
    // A punched page loses its image, and so does a page that is only reserved now.
    let commit = |ranges| DataCommit::of_ranges(ino, ranges, 10 * PAGE_SIZE_U64);
    world.meta.commit_data(&[commit(vec![range(2, 4, vec![])])]).expect("punch");
    assert_eq!(pages(&world.meta), of(ino, [0, 1, 4, 5, 6, 7, 8, 9]));
    let unwritten = Extent { state: ExtentState::Unwritten, ..extent(5, 1000 * ino.0 + 5, 1) };
    world.meta.commit_data(&[commit(vec![range(5, 6, vec![unwritten])])]).expect("zero");
    assert_eq!(pages(&world.meta), of(ino, [0, 1, 4, 6, 7, 8, 9]));
    // A cut in the midst of a page, once with a commit and once without.
    let set = |size| SetAttr { size: Some(size), ..SetAttr::default() };
    let cut = DataCommit::of_ranges(ino, vec![range(9, u64::MAX, vec![])], 9 * PAGE_SIZE_U64 - 1);
    world.meta.set_attr(ROOT_USER, ino, &set(9 * PAGE_SIZE_U64 - 1), Some(cut)).expect("cut");
    assert_eq!(pages(&world.meta), of(ino, [0, 1, 4, 6, 7, 8]));
    world.meta.set_attr(ROOT_USER, ino, &set(7 * PAGE_SIZE_U64), None).expect("cut");
    assert_eq!(pages(&world.meta), of(ino, [0, 1, 4, 6]));
    // A commit with no images to put keeps the images there are, and its new pages have none.
    let more =
        DataCommit { images: Images::Put(vec![]), ..commit(vec![range(9, 10, vec![extent(9, 9, 1)])]) };
    world.meta.commit_data(&[more]).expect("commit");
    assert_eq!(pages(&world.meta), of(ino, [0, 1, 4, 6]));
    world.assert_sound();

    // A write-back drops all images of its file and none of others.
    let other = world.file(ROOT, "other");
    put(&world.meta, other, 0, 2);
    let drop_all = DataCommit { images: Images::Drop, ..DataCommit::of_ranges(ino, vec![], 10) };
    world.meta.commit_data(&[drop_all]).expect("commit");
    assert_eq!(pages(&world.meta), of(other, 0..2));
    world.unlink(ROOT, "other").expect("unlink");
    assert_eq!(pages(&world.meta), []);
    world.assert_sound();
}

#[test]
fn a_file_in_many_pieces_loses_its_images_step_by_step() {
    let world = World::new();
    let ino = world.file(ROOT, "file");
    let count = REAP_BATCH_EXTENTS as u64 + 500;
    let scattered = (0..count).map(|index| extent(2 * index, 3 * index, 1)).collect();
    let images = Images::Put((0..count).map(|index| image(2 * index % 200)).collect());
    let all = DataCommit::of_ranges(ino, vec![range(0, 2 * count, scattered)], 2 * count * PAGE_SIZE_U64);
    world.meta.commit_data(&[DataCommit { images, ..all }]).expect("commit");
    let more = Images::Put(vec![image(2 * count - 2)]);
    let more = DataCommit { images: more, ..DataCommit::of_ranges(ino, vec![], 2 * count * PAGE_SIZE_U64) };
    world.meta.commit_data(&[more]).expect("commit");
    assert_eq!(pages(&world.meta).len(), 101);
    world.unlink(ROOT, "file").expect("unlink");
    world.assert_sound();
    let (_, next) = world.meta.reap_step(ino, FilePage(u64::MAX)).expect("reap");
    assert_eq!(pages(&world.meta).len(), 100, "the last page's is gone, the first ones' are not");
    world.assert_sound();
    world.meta.reap_step(ino, next.expect("there are more")).expect("reap");
    assert_eq!(pages(&world.meta), []);
    world.assert_sound();
}

#[test]
fn an_image_of_more_than_a_page_is_refused_and_a_stray_one_told() {
    let world = World::new();
    let ino = world.file(ROOT, "file");
    let large = PageImage { page: FilePage(0), bytes: vec![1; PAGE_SIZE + 1] };
    let commit =
        |image| DataCommit { images: Images::Put(vec![image]), ..DataCommit::of_ranges(ino, vec![], 0) };
    assert_eq!(world.meta.commit_data(&[commit(large)]), Err(Status::Invalid));
    // A server never makes this commit: an image of a page that the file does not have.
    world.meta.commit_data(&[commit(image(3))]).expect("commit");
    let survey = Survey::of(&*world.store, HASH_KEY, u64::MAX).expect("survey");
    let problems: Vec<_> = survey.problems.iter().map(|problem| problem.kind.name()).collect();
    assert_eq!((problems, image_count(&*world.store).expect("count")), (vec!["stray-image"], 1));
    assert_eq!(world.meta.images(None, 9).expect("images")[0].pool_page, None);
    world.meta.drop_images().expect("drop");
    world.assert_sound();
}

/// Wherever the log ends: the images, the mapping and the length of a sync are there together or not at all.
#[test]
fn a_torn_log_has_all_of_a_sync_or_nothing() {
    let directory = tempfile::tempdir().expect("directory");
    let (path, copy) = (directory.path().join("meta"), directory.path().join("copy"));
    // Behind the last byte that is not zero: a record ends there, or a zero or two later.
    let used = |path: &std::path::Path| {
        let log = fs::read(path.join("tail-0")).expect("read");
        (log.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1), log)
    };
    let (ino, before);
    {
        let store = open(&path);
        format(&*store);
        let world = World::on(store);
        ino = world.file(ROOT, "file");
        world.meta.flush().expect("flush");
        (before, _) = used(&path);
        let bytes: Vec<u8> = (0..PAGE_SIZE).map(|at| (at % 251) as u8 + 1).collect();
        let images = Images::Put(vec![PageImage { page: FilePage(0), bytes }]);
        let ranges = vec![range(0, 1, vec![extent(0, 7, 1)])];
        let commit = DataCommit { images, ..DataCommit::of_ranges(ino, ranges, 4000) };
        world.meta.commit_data(&[commit]).expect("commit");
        copy_files(&path, &copy);
    }
    let (whole, log) = used(&copy);
    assert!(whole > before + PAGE_SIZE);
    for end in (before..whole).step_by(61).chain([whole - 1, whole]) {
        let image = directory.path().join("image");
        copy_files(&copy, &image);
        let mut torn = log.clone();
        torn[end..].fill(0);
        fs::write(image.join("tail-0"), torn).expect("write");
        let store = open(&image);
        let meta = Meta::open(store.clone(), Arc::new(cuttlefs_common::world::ManualClock::default()))
            .expect("open");
        let images = meta.images(None, 9).expect("images");
        let (size, extents) = (meta.attr(ino).expect("attr").size, meta.extents(ino).expect("extents").len());
        assert_eq!((size, extents), if images.is_empty() { (0, 0) } else { (4000, 1) }, "cut at {end}");
        assert_eq!(images.len(), usize::from(end == whole), "cut at {end} of {whole}");
        images.iter().for_each(|image| {
            assert_eq!((image.pool_page, image.bytes.len()), (Some(PoolPage(7)), PAGE_SIZE));
        });
        drop(meta);
        drop(store);
        fs::remove_dir_all(&image).expect("remove");
    }
}

#[derive(Clone, Debug)]
enum Step {
    Put { file: usize, first: u64, len: u64 },
    Punch { file: usize, first: u64, len: u64 },
    Cut { file: usize, pages: u64 },
    InPlace { file: usize },
}

fn step() -> impl Strategy<Value = Step> {
    let at = || (0usize..3, 0u64..30, 1u64..6);
    prop_oneof![
        4 => at().prop_map(|(file, first, len)| Step::Put { file, first, len }),
        2 => at().prop_map(|(file, first, len)| Step::Punch { file, first, len }),
        1 => (0usize..3, 0u64..30).prop_map(|(file, pages)| Step::Cut { file, pages }),
        1 => (0usize..3).prop_map(|file| Step::InPlace { file }),
    ]
}

proptest! {
    /// After any number of batches exactly those pages have an image whose bytes were last put with one.
    #[test]
    fn any_prefix_of_batches_has_the_images_of_its_pages(steps in prop::collection::vec(step(), 1..30)) {
        let store = Arc::new(MemoryStore::new());
        format(&*store);
        let world = World::on(store.clone());
        let files = ["a", "b", "c"].map(|name| world.file(ROOT, name));
        world.meta.flush().expect("flush");
        let mut models = vec![std::collections::BTreeSet::new()];
        for step in steps {
            let mut model = models.last().expect("one").clone();
            match step {
                Step::Put { file, first, len } => {
                    put(&world.meta, files[file], first, first + len);
                    model.extend((first..first + len).map(|page| (files[file].0, page)));
                }
                Step::Punch { file, first, len } => {
                    let ino = files[file];
                    let size = world.attr(ino).size;
                    let commit = DataCommit::of_ranges(ino, vec![range(first, first + len, vec![])], size);
                    world.meta.commit_data(&[commit]).expect("commit");
                    model.retain(|at| at.0 != ino.0 || !(first..first + len).contains(&at.1));
                }
                Step::Cut { file, pages } => {
                    let ino = files[file];
                    let cut = DataCommit {
                        cut: CutStep::Unchanged,
                        ..DataCommit::of_ranges(ino, vec![range(pages, u64::MAX, vec![])], pages * PAGE_SIZE_U64)
                    };
                    let set = SetAttr { size: Some(pages * PAGE_SIZE_U64), ..SetAttr::default() };
                    world.meta.set_attr(ROOT_USER, ino, &set, Some(cut)).expect("cut");
                    model.retain(|at| at.0 != ino.0 || at.1 < pages);
                }
                Step::InPlace { file } => {
                    let size = world.attr(files[file]).size;
                    let commit = DataCommit::of_ranges(files[file], vec![], size);
                    world.meta.commit_data(&[DataCommit { images: Images::Drop, ..commit }]).expect("commit");
                    model.retain(|at| at.0 != files[file].0);
                }
            }
            models.push(model);
        }
        prop_assert_eq!(store.unflushed_batches() + 1, models.len());
        for (kept, model) in models.iter().enumerate() {
            let world = World::on(Arc::new(store.crashed(kept)));
            world.assert_sound();
            let expected: Vec<_> = model.iter().copied().collect();
            prop_assert_eq!(pages(&world.meta), expected, "{} batches kept", kept);
        }
    }
}
