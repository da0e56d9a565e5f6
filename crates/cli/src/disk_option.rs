//! The value of `--disk`: `datastore=NAME,size=SIZE[,name=NAME][,image=FILE]`.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use bytesize::ByteSize;
use vmseal_api::filter::CRYPT_SECTOR;
use vmseal_api::request::CreateDisk;

/// Parses the `index`th `--disk`; a disk that is not named is called after its place (`disk0`).
pub fn parse(option: &str, index: usize) -> anyhow::Result<CreateDisk> {
    let (mut datastore, mut size, mut name, mut image) = (None, None, None, None);
    for part in option.split(',') {
        let (key, value) = part
            .split_once('=')
            .with_context(|| format!("--disk {option}: '{part}' is not of the form key=value"))?;
        ensure!(!value.is_empty(), "--disk {option}: '{key}' has no value");
        let taken = match key {
            "datastore" => datastore.replace(value.to_owned()).is_some(),
            "size" => size.replace(parse_size(value)?).is_some(),
            "name" => name.replace(value.to_owned()).is_some(),
            "image" => image.replace(PathBuf::from(value)).is_some(),
            _ => bail!(
                "--disk {option}: there is no '{key}'; known are datastore, size, name and image"
            ),
        };
        ensure!(!taken, "--disk {option}: '{key}' is given twice");
    }
    let size = match (size, &image) {
        (Some(size), _) => size,
        (None, Some(image)) => size_of_image(image)?,
        (None, None) => bail!("--disk {option}: give size=SIZE or image=FILE"),
    };
    Ok(CreateDisk {
        name: name.unwrap_or_else(|| format!("disk{index}")),
        datastore: datastore.with_context(|| format!("--disk {option}: give datastore=NAME"))?,
        size,
        image,
    })
}

fn parse_size(text: &str) -> anyhow::Result<u64> {
    match text.parse::<ByteSize>() {
        Ok(size) => Ok(size.as_u64()),
        Err(why) => bail!("'{text}' is not a size such as 10GiB: {why}"),
    }
}

/// The image's size, rounded up to what a disk's size must be a multiple of.
fn size_of_image(image: &Path) -> anyhow::Result<u64> {
    let length = std::fs::metadata(image)
        .with_context(|| {
            format!("cannot see how large {} is from here: give size=SIZE", image.display())
        })?
        .len();
    Ok(length.next_multiple_of(u64::from(CRYPT_SECTOR)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_option_and_the_defaults() {
        let disk = parse("datastore=fast,size=2GiB,name=root,image=/a.raw", 0).unwrap();
        assert_eq!((disk.size, disk.name.as_str()), (2 << 30, "root"));
        assert_eq!(disk.image, Some(PathBuf::from("/a.raw")));
        assert_eq!(parse("size=4096,datastore=x", 3).unwrap().name, "disk3");
    }

    #[test]
    fn an_image_gives_the_size_rounded_up_to_a_sector() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(10_000).unwrap();
        let option = format!("datastore=x,image={}", file.path().display());
        assert_eq!(parse(&option, 0).unwrap().size, 12_288);
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (option, named) in [
            ("size=1GiB", "datastore=NAME"),
            ("datastore=x", "size=SIZE"),
            ("datastore=x,size=lots", "'lots'"),
            ("datastore=x,size=1MiB,size=2MiB", "twice"),
            ("datastore=x,colour=red", "'colour'"),
            ("datastore", "key=value"),
            ("datastore=", "no value"),
            ("datastore=x,image=/does/not/exist", "/does/not/exist"),
        ] {
            let message = format!("{:#}", parse(option, 0).unwrap_err());
            assert!(message.contains(named), "{option}: {message}");
        }
    }
}
