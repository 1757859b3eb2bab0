//! `apply`: one operation, from metadata as it stands to the batch that does it. Pure: it reads the view and the
//! context, and changes nothing, so that live and replayed operations go the same way.
//!
//! POSIX lives here, as pjdfstest and xfstests check it on Linux. Permission checks do not: the client's kernel makes
//! them (`default_permissions`), and the RPC layer makes those of the export.

mod acl;
mod attributes;
mod data;
mod marks;
mod names;
mod privileges;

pub(super) use attributes::mark_of;

use super::draft::{Applied, Draft};
use super::error::MetaError;
use super::key;
use super::operation::{ApplyContext, Operation, Outcome};
use super::record::{self, ClientRecord, InodeRecord};
use super::view::View;

/// Works out what `operation` does to what `view` shows.
///
/// # Errors
/// [`MetaError::Refused`] if POSIX says no; others if the metadata cannot be read.
pub fn apply(
    view: &View<'_>,
    operation: &Operation<'_>,
    context: &ApplyContext<'_>,
) -> Result<Applied, MetaError> {
    let mut draft = Draft::new(*view);
    let d = &mut draft;
    let outcome = match operation {
        Operation::Make { parent, name, node, mode } => names::make(d, context, *parent, name, node, *mode),
        Operation::Create { parent, name, mode, exclusive } => {
            names::create(d, context, *parent, name, *mode, *exclusive)
        }
        Operation::CreateNameless { parent, mode } => names::create_nameless(d, context, *parent, *mode),
        Operation::Link { ino, parent, name } => names::link(d, context, *ino, *parent, name),
        Operation::Unlink { parent, name } => names::unlink(d, context, *parent, name),
        Operation::Rmdir { parent, name } => names::rmdir(d, context, *parent, name),
        Operation::Rename { parent, name, new_parent, new_name, mode } => {
            names::rename(d, context, (*parent, name), (*new_parent, new_name), *mode)
        }
        Operation::SetAttr { ino, set, commit } => {
            attributes::set_attr(d, context, *ino, set, commit.as_deref())
        }
        Operation::SetXattr { ino, name, value, mode } => {
            attributes::set_xattr(d, context, *ino, name, value, *mode)
        }
        Operation::DropPrivileges { ino } => privileges::drop_privileges(d, context, *ino),
        Operation::RemoveXattr { ino, name } => attributes::remove_xattr(d, context, *ino, name),
        Operation::CommitData { commits, stamps } => data::commit_data(d, commits, stamps),
        Operation::ReapOrphan { ino, below } => data::reap_orphan(d, context, *ino, *below),
        Operation::PutClient { client, owner } => {
            let record = ClientRecord { has_session: true, owner: owner.clone() };
            d.batch.put(key::client(*client), record::encode(&record));
            Ok(Outcome::default())
        }
        Operation::EndSession { client } => {
            if let Some(record) = d.view.client(*client)? {
                let record = ClientRecord { has_session: false, ..record };
                d.batch.put(key::client(*client), record::encode(&record));
            }
            Ok(Outcome::default())
        }
        Operation::RemoveClient { client } => {
            let keys = d.view.keys(&key::all_of_client(*client))?;
            keys.into_iter().for_each(|key| d.batch.remove(key));
            Ok(Outcome::default())
        }
    }?;
    draft.finish(outcome)
}

/// Contents of a directory changed.
fn touch_contents(record: &mut InodeRecord, context: &ApplyContext<'_>) {
    record.mtime = context.now;
    touch_inode(record, context);
}

/// The inode itself changed.
fn touch_inode(record: &mut InodeRecord, context: &ApplyContext<'_>) {
    record.ctime = context.now;
    record.change = context.next_change(record.change);
}
