//! What is looked up in any element of a libvirt domain.

use std::collections::BTreeMap;

use roxmltree::Node;

/// The first child of this name.
pub fn child<'a>(of: Node<'a, 'a>, name: &str) -> Option<Node<'a, 'a>> {
    of.children().find(|child| child.has_tag_name(name))
}

/// The text of that child, if it has any.
pub fn text_of<'a>(of: Node<'a, 'a>, name: &str) -> Option<&'a str> {
    child(of, name)?.text().map(str::trim).filter(|text| !text.is_empty())
}

/// The elements that are not known, with their counts.
pub fn unknown(of: Node<'_, '_>, known: &[&str]) -> BTreeMap<String, u32> {
    let mut counts = BTreeMap::<String, u32>::new();
    for child in of.children().filter(Node::is_element) {
        let name = child.tag_name().name();
        if !known.contains(&name) {
            *counts.entry(name.to_owned()).or_default() += 1;
        }
    }
    counts
}
