//! The value of `--disk`: `datastore=NAME,size=SIZE[,name=NAME][,image=FILE,format=FORMAT][,encrypted=yes|no]`. A comma
//! within a value is doubled, as in QEMU. A disk that is added to a VM has a name, and may be without a datastore.

use std::io::{BufRead, IsTerminal, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow, bail, ensure};
use vmseal_api::request::{AddDisk, CreateDisk};
use vmseal_api::transfer::ImageFormat;

use crate::exit::{Ended, Exit};
use crate::images;
use crate::size::parse_size;
use crate::stream::say;

/// The keys of the option.
pub const DISK_KEYS: [&str; 6] = ["datastore", "size", "name", "image", "format", "encrypted"];

/// What to do if the size of an image cannot be read here.
const SIZE_OF_IMAGE: &str = "if it is on the datastore's host, and that is another machine, give its size as well (size=SIZE)";

/// The values of its key `encrypted`.
pub const YES_NO: [(&str, bool); 2] = [("yes", true), ("no", false)];

/// Parses all values of `--disk`, in the order in which they were given.
pub fn parse_all(options: &[String]) -> anyhow::Result<Vec<CreateDisk>> {
    let terminal = std::io::stdin().is_terminal();
    options.iter().enumerate().map(|(index, it)| parse(it, index, terminal)).collect()
}

/// Parses a `--disk` that is added to a VM: it has a name of its own, as no place gives it one, and may leave its
/// datastore to the server, which knows the VM's other disks.
pub fn parse_named(option: &str) -> anyhow::Result<AddDisk> {
    let parts = split(option).map_err(|why| Ended::new(Exit::Usage, format!("{why:#}")))?;
    if parts.name.is_none() {
        let message = format!("--disk {option}: give it a name: name=NAME");
        return Err(Ended::new(Exit::Usage, message).into());
    }
    read(option, parts, 0, std::io::stdin().is_terminal())
}

/// Parses the `index`th `--disk` of a new VM, which names its datastore.
fn parse(option: &str, index: usize, terminal: bool) -> anyhow::Result<CreateDisk> {
    let parts = split(option).map_err(|why| Ended::new(Exit::Usage, format!("{why:#}")))?;
    let Some(datastore) = parts.datastore.clone() else {
        let message = format!("--disk {option}: give datastore=NAME");
        return Err(Ended::new(Exit::Usage, message).into());
    };
    Ok(read(option, parts, index, terminal)?.on(datastore))
}

/// The `index`th disk of these parts; one without a name is named after its place (`disk0`). If the format of an image is
/// missing and there is a terminal, asks for it.
fn read(option: &str, parts: Parts, index: usize, terminal: bool) -> anyhow::Result<AddDisk> {
    let image = match (parts.image, parts.format) {
        (Some(image), format) if images::is_name(&image) => {
            let (path, known) = images::find(&images::directories()?, &image.to_string_lossy())?;
            Some((path, format.unwrap_or(known)))
        }
        (Some(image), Some(format)) => Some((image, format)),
        (Some(image), None) => {
            let format = ask_format(&image, terminal)?;
            Some((image, format))
        }
        (None, _) => None,
    };
    let size = match (parts.size, &image) {
        (Some(size), _) => size,
        (None, Some((image, format))) => images::size_of_image(image, *format)
            .map_err(|error| images::with_remedy(error, SIZE_OF_IMAGE))?,
        (None, None) => {
            let message = format!("--disk {option}: give size=SIZE or image=FILE,format=FORMAT");
            return Err(Ended::new(Exit::Usage, message).into());
        }
    };
    let (image, format) = image.unzip();
    Ok(AddDisk {
        name: parts.name.unwrap_or_else(|| format!("disk{index}")),
        datastore: parts.datastore,
        size,
        image,
        format,
        force: false,
        encrypted: parts.encrypted,
    })
}

/// The parsed option, before the image is read.
struct Parts {
    datastore: Option<String>,
    size: Option<u64>,
    name: Option<String>,
    image: Option<PathBuf>,
    format: Option<ImageFormat>,
    encrypted: Option<bool>,
}

fn split(option: &str) -> anyhow::Result<Parts> {
    let (mut datastore, mut size, mut name) = (None, None, None);
    let (mut image, mut format, mut encrypted) = (None, None, None);
    for part in parts(option) {
        let (key, value) = part
            .split_once('=')
            .with_context(|| format!("--disk {option}: '{part}' is not of the form key=value; a comma within a value is doubled (,,)"))?;
        ensure!(!value.is_empty(), "--disk {option}: '{key}' has no value");
        let taken = match key {
            "datastore" => datastore.replace(value.to_owned()).is_some(),
            "size" => size
                .replace(parse_size(value).map_err(|why| anyhow!("--disk {option}: {why}"))?)
                .is_some(),
            "name" => name.replace(value.to_owned()).is_some(),
            "image" => image.replace(PathBuf::from(value)).is_some(),
            "format" => format
                .replace(parse_format(value).with_context(|| format!("--disk {option}"))?)
                .is_some(),
            "encrypted" => encrypted
                .replace(parse_yes_no(value).with_context(|| format!("--disk {option}"))?)
                .is_some(),
            _ => bail!(
                "--disk {option}: there is no '{key}'; there are datastore, size, name, image, format and encrypted"
            ),
        };
        ensure!(!taken, "--disk {option}: '{key}' is given twice");
    }
    ensure!(
        image.is_some() || format.is_none(),
        "--disk {option}: 'format' is for an image, and none is given"
    );
    Ok(Parts { datastore, size, name, image, format, encrypted })
}

/// The parts between single commas; a doubled comma is part of a value.
pub fn parts(option: &str) -> Vec<String> {
    let (mut parts, mut rest) = (vec![String::new()], option);
    while let Some((before, behind)) = rest.split_once(',') {
        let doubled = behind.strip_prefix(',');
        if let Some(part) = parts.last_mut() {
            part.push_str(before);
            if doubled.is_some() {
                part.push(',');
            }
        }
        if doubled.is_none() {
            parts.push(String::new());
        }
        rest = doubled.unwrap_or(behind);
    }
    if let Some(part) = parts.last_mut() {
        part.push_str(rest);
    }
    parts
}

fn parse_format(text: &str) -> anyhow::Result<ImageFormat> {
    let found = ImageFormat::ALL.into_iter().find(|format| format.name() == text);
    found.with_context(|| format!("'{text}' is not a format: raw or qcow2"))
}

fn parse_yes_no(text: &str) -> anyhow::Result<bool> {
    let found = YES_NO.into_iter().find(|(word, _)| *word == text);
    found.map(|(_, is)| is).with_context(|| format!("'{text}' is not yes or no"))
}

/// Asks for the format of an image. It is not detected: a guest can write any header into a raw disk.
fn ask_format(image: &Path, terminal: bool) -> anyhow::Result<ImageFormat> {
    if !terminal {
        let message = format!(
            "give the format of {}: add format=raw or format=qcow2 to --disk",
            image.display()
        );
        return Err(Ended::new(Exit::Usage, message).into());
    }
    loop {
        eprint!("The format of {} (raw or qcow2): ", image.display());
        std::io::stderr().flush()?;
        let mut answer = String::new();
        ensure!(std::io::stdin().lock().read_line(&mut answer)? > 0, "no format was given");
        match parse_format(answer.trim()) {
            Ok(format) => return Ok(format),
            Err(error) => say(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_option_and_the_defaults() {
        let disk =
            parse("datastore=fast,size=2GiB,name=root,image=/a.raw,format=raw", 0, false).unwrap();
        assert_eq!((disk.size, disk.name.as_str()), (2 << 30, "root"));
        assert_eq!(disk.image, Some(PathBuf::from("/a.raw")));
        assert_eq!(disk.format, Some(ImageFormat::Raw));
        let disk = parse("size=4096,datastore=x", 3, false).unwrap();
        assert_eq!((disk.name.as_str(), disk.encrypted), ("disk3", None));
    }

    #[test]
    fn a_disk_that_is_added_has_a_name_and_may_be_without_a_datastore() {
        let disk = parse_named("size=1GiB,name=logs").unwrap();
        assert_eq!((disk.datastore, disk.name.as_str()), (None, "logs"));
        let disk = parse_named("datastore=fast,size=1GiB,name=logs").unwrap();
        assert_eq!(disk.datastore.as_deref(), Some("fast"));
        assert_eq!(disk.encrypted, None);
        let message = parse_named("size=1GiB").unwrap_err().to_string();
        assert!(message.contains("name=NAME"), "{message}");
    }

    #[test]
    fn a_disk_says_whether_it_is_encrypted() {
        for (word, is) in YES_NO {
            let disk = parse(&format!("datastore=x,size=4096,encrypted={word}"), 0, false).unwrap();
            assert_eq!(disk.encrypted, Some(is), "{word}");
            let disk = parse_named(&format!("size=4096,name=logs,encrypted={word}")).unwrap();
            assert_eq!(disk.encrypted, Some(is), "{word}");
        }
    }

    #[test]
    fn a_comma_of_a_value_is_doubled() {
        let option = "datastore=x,size=4096,image=/a,,b,,,,c.raw,format=raw,name=n,,";
        let disk = parse(option, 0, false).unwrap();
        assert_eq!(disk.image, Some(PathBuf::from("/a,b,,c.raw")));
        assert_eq!((disk.name.as_str(), disk.size), ("n,", 4096));
        // A single comma still separates.
        let message = parse("datastore=x,size=4096,image=/a,b", 0, false).unwrap_err().to_string();
        assert!(message.contains("'b' is not of the form") && message.contains(",,"), "{message}");
    }

    #[test]
    fn an_image_gives_the_size_rounded_up_to_a_sector() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(10_000).unwrap();
        let option = format!("datastore=x,format=raw,image={}", file.path().display());
        assert_eq!(parse(&option, 0, false).unwrap().size, 12_288);
    }

    #[test]
    fn errors_name_the_wrong_part() {
        for (option, named) in [
            ("size=1GiB", "datastore=NAME"),
            ("datastore=x", "size=SIZE"),
            ("datastore=x,size=lots", "'lots'"),
            ("datastore=x,size=1MiB,size=2MiB", "twice"),
            ("datastore=x,colour=red", "'colour'"),
            ("datastore", "key=value"),
            ("datastore=", "no value"),
            ("datastore=x,format=raw,image=/does/not/exist", "/does/not/exist"),
            ("datastore=x,format=qcow2,image=/dev/null", "/dev/null"),
            ("datastore=x,image=/dev/null,format=vmdk", "format=vmdk: 'vmdk' is not a format"),
            ("datastore=x,size=1MiB,encrypted=luks", "'luks' is not yes or no"),
            ("datastore=x,size=1MiB,encrypted=no,encrypted=no", "twice"),
            ("datastore=x,size=1MiB,format=raw", "none is given"),
            ("datastore=x,size=1MiB,image=/dev/null", "give the format"),
        ] {
            let message = format!("{:#}", parse(option, 0, false).unwrap_err());
            assert!(message.contains(named), "{option}: {message}");
        }
    }
}
