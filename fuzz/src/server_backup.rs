//! What is read of a server's backup before and after it is opened: its head, and the list of its files. A path that is
//! accepted stays below the data directory.

use std::path::{Component, Path};

use vmseal_api::server_backup::{ENVELOPE_MAX, HEAD_LEN, head, parse_head, parse_list};

/// See the module.
pub fn run(data: &[u8]) {
    if let Some((start, _)) = data.split_first_chunk::<HEAD_LEN>()
        && let Ok(length) = parse_head(start)
    {
        assert!((1..=ENVELOPE_MAX).contains(&length));
        assert_eq!(head(length), *start);
    }
    let Ok(list) = parse_list(data) else { return };
    for file in &list.files {
        let path = Path::new(&file.path);
        assert!(path.components().all(|part| matches!(part, Component::Normal(_))), "{path:?}");
        assert!(path.components().count() <= 3);
    }
    assert_eq!(parse_list(&serde_json::to_vec(&list).unwrap()).unwrap(), list);
}
